"""Values: units, numbers as text, booleans as text (case C87), and their way back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recipe.small import problems, small
from truestep.recipe import units
from truestep.recipe.load import dump, load


@pytest.mark.parametrize(
    "text, value",
    [
        ("50M", 50_000_000),
        ("1.5B", 1_500_000_000),
        ("0.57M", 570_000),
        ("1e3", 1000),
        ("1_000", 1000),
        (" 2 K ", 2000),
        (7, 7),
        (1e3, 1000),
        ("1.1T", 1_100_000_000_000),
        ("2G", 2_000_000_000),
    ],
)
def test_counts(text, value):
    assert units.parse_count(text) == value


@pytest.mark.parametrize("text", ["1.5", "0.0001K", "-1", "5X", "M", "", "0123", "nan", True, None, [1], 0.5, "1e-1"])
def test_what_is_no_count(text):
    with pytest.raises(ValueError):
        units.parse_count(text)


@pytest.mark.parametrize("text, value", [("8MiB", 8 * 2**20), ("1.5KiB", 1536), ("3MB", 3_000_000), ("7B", 7), (9, 9)])
def test_bytes(text, value):
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize(
    "text, value", [("10m", 600.0), ("1.5h", 5400.0), ("250ms", 0.25), ("0s", 0.0), ("1d", 86400.0)]
)
def test_seconds(text, value):
    assert units.parse_seconds(text) == value


@pytest.mark.parametrize("text", [600, 600.0, "600", "10 min", "-1s", "1e9999s" * 2])
def test_a_time_without_its_unit_is_refused(text):
    with pytest.raises(ValueError):
        units.parse_seconds(text)


@given(st.integers(0, 10**18))
def test_counts_and_bytes_print_back_exactly(number):
    assert units.parse_count(units.format_count(number)) == number
    assert units.parse_bytes(units.format_bytes(number)) == number


@given(st.floats(0, 1e12, allow_nan=False))
def test_seconds_print_back_exactly(seconds):
    assert units.parse_seconds(units.format_seconds(seconds)) == seconds


def test_c87_numbers_as_text():
    recipe = small()
    recipe["stages"][0] |= {"optim": {"lr": "1e-5"}, "context": "1.28e2"}
    loaded = load(recipe, ["run.seed=1e3"])
    assert loaded.stages[0].optim.lr == 0.00001 and loaded.stages[0].context == 128
    assert loaded.run.seed == 1000 and isinstance(loaded.run.seed, int)
    assert load(small(), ["stages.base.optim.lr=1.0e-5"]).stages[0].optim.lr == 0.00001
    assert load(load(small(), ["stages.base.optim.lr=1e-5"])).stages[0].optim.lr == 0.00001


@pytest.mark.parametrize("text", ["1e-1", '"1e-1"', "0.5", "true", "ten", '"0123"', "0123", "nan", "inf"])
def test_c87_what_is_no_whole_number_is_refused(text):
    (sentence,) = problems(small(), f"run.seed={text}")
    assert sentence.startswith("--set: run.seed is ")


@pytest.mark.parametrize("text", ["true", "nan", "inf", "fast", "[1]"])
def test_c87_what_is_no_number_is_refused(text):
    (sentence,) = problems(small(), f"stages.base.optim.lr={text}")
    assert sentence.startswith("--set: stages.base.optim.lr is ")


def test_c87_leading_zero_is_refused_everywhere():
    """In a file 0123 is not TOML; as text, or in --set, it is refused: never 83, and never a silent 123."""
    assert "is not TOML" in problems("[run]\nname = 'a'\nseed = 0123\n")[0]
    assert problems(small(), "run.seed=0123") == [
        "--set: run.seed is \"0123\": '0123' has a leading zero; write 123 (seed of initialisation and data order)."
    ]
    assert "leading zero" in problems(small(run={"name": "a", "seed": "0123"}))[0]
    assert "leading zero" in problems(small(), "stages.base.tokens=01M")[0]


@pytest.mark.parametrize(
    "text, value", [("False", False), ("false", False), ("0", False), ("no", False), ("off", False)]
)
def test_c87_false_never_switches_on(text, value):
    assert load(small(), [f"machine.compile={text}"]).machine.compile is value
    assert load(small(machine={"compile": text})).machine.compile is value


@pytest.mark.parametrize("text", ["True", "true", "1", "yes", "on"])
def test_c87_true(text):
    assert load(small(), [f"machine.compile={text}"]).machine.compile is True


@pytest.mark.parametrize("text", ["maybe", "2", "''", "[]"])
def test_c87_maybe_is_refused(text):
    (sentence,) = problems(small(), f"machine.compile={text}")
    assert sentence.startswith("--set: machine.compile is ") and "it takes: true or false" in sentence


@pytest.mark.parametrize("text", ["no", "off", "false", "123", "1e3", "0123", "2024-01-01"])
def test_c87_text_stays_text(text):
    assert load(small(), [f"run.name={text}"]).run.name == text
    assert load(small(), [f'run.name="{text}"']).run.name == text


def test_c87_resolved_recipe_shows_types_and_reads_back_to_the_same_values():
    recipe = load(small(), ["run.name=no", "run.seed=1e3", "machine.compile=False", "stages.base.optim.lr=1e-5"])
    text = dump(recipe)
    assert 'name = "no"  # text' in text and "seed = 1000  # whole number >= 0" in text
    assert "compile = false  # true or false" in text and "lr = 1e-05  # number > 0" in text
    assert load(text) == recipe


def test_booleans_inside_lists_of_numbers_are_refused():
    assert "stages.base.optim.betas" in problems(small(), "stages.base.optim.betas=[false, 0.9]")[0]
