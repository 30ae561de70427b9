"""Whatever stands in a recipe, loading gives a Recipe or a RecipeError of whole sentences, nothing else."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipe.small import small
from truestep.errors import RecipeError
from truestep.recipe.load import dump, load
from truestep.recipe.recipe import Recipe

_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["5M", "stage:base"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("name"), inner, max_size=3)
    ),
    max_leaves=5,
)
_rich = dict(
    small(),
    tokenizer={"kind": "train-bpe", "data": ["train"]},
    machine={"mesh": {"dp_shard": 2}, "timeout": "3m"},
    ledger={"pue": 1.2},
    checkpoint={"every": 3},
)
_rich["model"]["rope_scaling"] = {"kind": "yarn", "factor": 2.0}
_rich["data"]["train"]["decontaminate"] = {"against": ["a.txt"]}
_rich["stages"][0] |= {
    "ramp": [{"after": "8192", "batch_tokens": "16384"}],
    "sample": {"prompts": ["a"]},
    "optim": {"schedule": {"warmup": 3}},
}


@st.composite
def _changed(draw, value: Any) -> Any:
    """The value with something in it replaced, added or taken out."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 4)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(st.sampled_from(keys))
        out = value.copy()
        match draw(st.integers(0, 6)):
            case 0:
                del out[key]
            case 1 if isinstance(out, dict):
                out[draw(st.text(max_size=6))] = draw(_values)
            case _:
                out[key] = draw(_changed(value[key]))
        return out
    return draw(_values)


def _check(source: Any, overrides: list[str]) -> None:
    try:
        recipe = load(source, overrides)
    except RecipeError as error:
        assert error.problems
        for sentence in error.problems:
            assert sentence.endswith((".", "?")) and "\n" not in sentence, sentence
    else:
        assert isinstance(recipe, Recipe) and load(dump(recipe)) == recipe


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_of_a_recipe(data):
    recipe: Any = _rich
    for _ in range(data.draw(st.integers(1, 3))):
        recipe = data.draw(_changed(recipe))
    _check(recipe if isinstance(recipe, dict) else {"run": recipe}, [])


_paths = st.lists(
    st.sampled_from(
        ["stages", "base", "0", "optim", "lr", "data", "train", "model", "run", "name", "ramp", "after", "x", ""]
    ),
    min_size=1,
    max_size=5,
).map(".".join)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(_paths, st.text(max_size=6) | st.sampled_from(["[1]", "{a=1}", "3", "true", '"a"'])), max_size=3)
)
def test_any_override(pairs):
    _check(_rich, [f"{path}={value}" for path, value in pairs])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_any_text(text):
    _check(text + "\n", [])
