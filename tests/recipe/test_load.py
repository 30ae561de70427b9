"""Loading: sources, overrides, and every problem in one go, each in one sentence."""

from pathlib import Path

import pytest

from tests.recipe.small import problems, small
from truestep.errors import RecipeError
from truestep.recipe.load import dump, load
from truestep.recipe.machine import Run
from truestep.recipe.model import ModelSection
from truestep.recipe.recipe import Recipe


def test_a_file_a_text_a_mapping_and_a_recipe_load_alike(tmp_path):
    recipe = load(small())
    text = dump(recipe)
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    assert load(text) == load(file) == load(str(file)) == load(recipe) == recipe


def test_sections_may_stand_in_a_mapping():
    recipe = small(run=Run(name="a", seed=3), model=ModelSection(hidden_size=64, rope_scaling=None))
    assert load(recipe).run.seed == 3


def test_the_mapping_is_not_changed():
    recipe = small()
    load(recipe, ["stages.base.optim.lr=0.1", "machine.compile=true"])
    assert recipe == small()


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda path: None, "cannot be read: No such file or directory; check the path."),
        (lambda path: path.mkdir(), "cannot be read: Is a directory; give the path of a readable TOML file."),
        (
            lambda path: path.write_text("a = = 1\n"),
            "is not TOML: Invalid value (at line 1, column 5); correct it there.",
        ),
        (lambda path: path.write_bytes(b"a = '\xff'\n"), "is not UTF-8 text (byte 5); save it as UTF-8."),
    ],
)
def test_files_that_are_no_recipe(tmp_path, make, says):
    file = tmp_path / "recipe.toml"
    make(file)
    assert problems(file) == [f"{file} {says}"]


def test_unreadable_file(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert problems("a.toml") == ["a.toml cannot be read: Permission denied; give the path of a readable TOML file."]


def test_every_problem_at_once_with_file_field_value_and_remedy(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text(
        dump(load(small()))
        .replace("lr = 0.0003", 'lr = "fast"\nlrr = 1')
        .replace("compile = false", 'compile = "maybe"')
        .replace('tokens = "1M"', "")
        .replace("max_bits_per_byte", "max_bits_per_bite")
        .replace("num_heads = 4", "num_heads = 5")
    )
    found = problems(file)
    assert [sentence.removeprefix(f"{file}: ") for sentence in found] == [
        'stages.base.optim.lr is "fast"; it takes: number > 0 (peak learning rate).',
        "stages.base.optim.lrr is not a field; did you mean 'lr'?",
        "stages.base.gate.max_bits_per_bite is not a field; did you mean 'max_bits_per_byte'?",
        'machine.compile is "maybe"; it takes: true or false (torch.compile every block).',
        "model.num_heads is 5, which does not divide hidden_size 64; change one, or set head_dim.",
        "stages.base.tokens is missing; set it, or epochs.",
    ]


def test_an_empty_recipe_says_what_is_needed():
    assert [sentence.split(";")[0] for sentence in problems({})] == [
        "recipe: run is missing",
        "recipe: stages is missing",
    ]


@pytest.mark.parametrize(
    "override, says",
    [
        ("stages.base.lr=1", "stages.base.lr is not a field; did you mean 'optim.lr'?"),
        ("stages.base.optim.schedul.kind=wsd", "stages.base.optim.schedul is not a field; did you mean 'schedule'?"),
        ("modle.num_layers=2", "modle is not a field; did you mean 'model'?"),
        (
            "stages.base.data=[{data='train', wieght=1}]",
            "stages.base.data.0.wieght is not a field; did you mean 'weight'?",
        ),
        ("stages.base.data=[1]", "stages.base.data.0 is 1; it takes: table (a [data.*] section, or a mixture)."),
        ("stages.base.data={}", "stages.base.data is {}; it takes: text or list of tables (a [data.*] section"),
        ("machine.mesh.dp_shard=none", 'machine.mesh.dp_shard is "none"; it takes: whole number >= 1 or "auto" ('),
        ("machine.mesh.dp_shard=0", 'machine.mesh.dp_shard is 0; it takes: whole number >= 1 or "auto" ('),
        (
            "run.name=a/b",
            'run.name is "a/b"; it takes: text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$ (name of the run',
        ),
        ("checkpoint.every_time=600", 'checkpoint.every_time is 600: 600 has no unit; write it as in "10m" or "30s"'),
        ("ledger.pue=0.9", "ledger.pue is 0.9; it takes: number >= 1 (power usage effectiveness of the site)."),
        ("ledger=3", "ledger is 3; it takes: table (what the card records)."),
    ],
)
def test_sentences(override, says):
    (sentence,) = problems(small(), override)
    assert sentence.startswith(f"--set: {says}"), sentence


def test_overrides_reach_stages_by_name_new_sections_and_list_items():
    recipe = small()
    recipe["stages"][0]["ramp"] = [{"after": "100K", "batch_tokens": 16384}]
    loaded = load(
        recipe,
        [
            "stages.base.optim.schedule.kind=cosine",
            "stages.base.sample.prompts=['a']",
            "stages.base.ramp.0.after=200K",
            "machine.mesh.dp_replicate=2",
            "data.held.storage_options=",
            "stages.base.context = 64 ",
        ],
    )
    stage = loaded.stages[0]
    assert stage.optim.schedule.kind == "cosine" and stage.sample is not None and stage.sample.prompts == ["a"]
    assert stage.ramp[0].after == 200_000 and loaded.machine.mesh.dp_replicate == 2 and stage.context == 64


def test_an_override_with_nothing_after_it_takes_the_field_out():
    loaded = load(small(machine={"compile": True}), ["machine.compile=", "model=", "stages.base.start=org/model@abc"])
    assert loaded.machine.compile is False and loaded.model is None


@pytest.mark.parametrize(
    "override, says",
    [
        ("run.name", "is not of the form path=value; write, for example, stages.base.optim.lr=3e-4."),
        ("=3", "is not of the form path=value; write, for example, stages.base.optim.lr=3e-4."),
        ("run..name=3", "is not of the form path=value; write, for example, stages.base.optim.lr=3e-4."),
        ("stages.bse.context=64", "points to 'bse', which is not in stages; did you mean 'base'?"),
        ("run.name.first=a", "goes into run.name, which is a value and has no fields."),
    ],
)
def test_overrides_that_point_nowhere(override, says):
    assert problems(small(), override) == [f"--set {override} {says}"]


def test_a_line_break_in_an_override_is_no_second_field():
    (sentence,) = problems(small(), "run.seed=1\nother = 2")
    assert sentence.startswith("--set: run.seed is ")


def test_problems_that_rest_on_a_wrong_value_are_not_invented():
    """A wrong `dedup` hides whether near_threshold is used; a wrong context, whether the batch can be divided."""
    assert len(problems(small(), "data.train.dedup=nera", "data.train.near_threshold=0.5")) == 1
    assert len(problems(small(), "stages.base.context=0", "stages.base.batch_tokens=1000")) == 1
    assert len(problems(small(), "machine.microbatch_rows=x", "stages.base.batch_tokens=384")) == 1
    assert len(problems(small(), "stages.base.gate=", "stages.base.name=Not Good")) == 1


def test_a_recipe_made_in_python_is_checked_too():
    recipe = load(small())
    wrong = recipe.model_copy(update={"model": ModelSection(num_heads=3)})
    with pytest.raises(RecipeError, match=r"model\.num_heads is 3"):
        load(wrong)
    assert isinstance(wrong, Recipe)
