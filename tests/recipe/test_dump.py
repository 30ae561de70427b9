"""A resolved recipe reads back to an equal recipe; the JSON schema accepts and refuses what loading does."""

import datetime
import tomllib
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipe.small import problems, small
from truestep.recipe import digests
from truestep.recipe.dump import toml
from truestep.recipe.load import dump, json_schema, load
from truestep.recipe.paths import walk
from truestep.recipe.recipe import Recipe

_text = st.text(min_size=1, max_size=12)
_number = st.floats(1e-12, 0.9, allow_nan=False)
_optim = st.fixed_dictionaries(
    {},
    optional={"lr": _number, "eps": _number, "betas": st.tuples(_number, _number), "clip_norm": st.floats(0, 1e30)},
)
_stage = st.fixed_dictionaries(
    {},
    optional={
        "optim": _optim,
        "tokens": st.integers(10**5, 10**14),
        "mask_documents": st.booleans(),
        "sample": st.fixed_dictionaries({"prompts": st.lists(_text, min_size=1, max_size=3)}),
        "ramp": st.just([{"after": 8192, "batch_tokens": "16384"}]),
        "data": st.just([{"data": "train", "weight": 0.3, "max_epochs": 2}, {"data": "more"}]),
        "gate": st.one_of(
            st.fixed_dictionaries({"kind": st.just("none"), "reason": _text.filter(str.strip)}),
            st.fixed_dictionaries({"max_loss": st.floats(1e-9, 1e9)}),
        ),
    },
)
_options = st.dictionaries(
    _text,
    st.recursive(
        _text | st.integers() | st.booleans() | st.floats(allow_nan=False) | st.dates(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@st.composite
def recipes(draw) -> dict[str, Any]:
    recipe = small()
    recipe["stages"][0] |= draw(_stage)
    if isinstance(recipe["stages"][0]["data"], list):
        recipe["data"]["more"] = {"source": "text", "path": draw(st.lists(_text, min_size=1))}
    for section in recipe["data"].values():
        section["options"] = draw(_options)
    shared = recipe["data"]["train"]["options"]
    recipe["data"]["held"]["options"] = shared
    recipe["run"] |= {"dir": draw(_text), "seed": draw(st.integers(0, 2**63))}
    timeout = draw(st.floats(0, 1e6))
    recipe["machine"] = {"timeout": f"{timeout!r}s", "cache": draw(_text)}
    return recipe


@settings(max_examples=60, deadline=None)
@given(recipes())
def test_load_of_dump_is_equal(mapping):
    recipe = load(mapping)
    text = dump(recipe)
    again = load(text)
    assert again == recipe and dump(again) == text
    for digest in (digests.what, digests.where, digests.bits):
        assert digest(again) == digest(recipe)
    assert load(recipe) == recipe


def test_every_field_stands_in_the_dump_with_its_type():
    recipe = load(small())
    lines = dump(recipe).splitlines()
    for _, section in walk(recipe):
        for name in type(section).model_fields:
            shown = [line for line in lines if line.startswith((f"{name} = ", f"# {name}: ", f"[{name}", f"[[{name}"))]
            shown += [line for line in lines if line.startswith("#") and f".{name}: " in line]  # of an idle section
            assert shown or any(line.strip("[]").split(".")[-1] == name for line in lines if line.startswith("[")), name
    assert all("  # " in line for line in lines if " = " in line and not line.startswith("#"))


def test_options_without_effect_are_comments_only():
    text = dump(load(small()))
    assert '# muon_lr: number > 0; not used, it needs kind = "muon"' in text
    assert "# sliding_window: whole number > 0; not set" in text
    assert "muon_lr =" in dump(load(small(), ["stages.base.optim.kind=muon"]))


def test_a_source_of_ones_own_does_not_get_text_field_from_the_dump():
    """It would be an unknown argument to a class that does not take it."""
    recipe = load(small(), ["data.train.source=my.module:Source", "data.held.source=my.module:Source"])
    assert "text_field" not in load(dump(recipe)).data["train"].model_fields_set
    given = load(recipe, ["data.train.text_field=body"])
    assert load(dump(given)).data["train"].text_field == "body"


@pytest.mark.parametrize(
    "value",
    [
        'a"b\\c\n\t\x00\x1f\x7f é 😀 ',
        "",
        -3,
        10**30,
        1e300,
        5e-324,
        True,
        [],
        {},
        {"a b": {"": [1, {"x.y": 2}]}},
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.time(1, 2),
    ],
)
def test_values_in_toml(value):
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value


def test_what_toml_cannot_hold_is_refused():
    recipe = small()
    recipe["data"]["train"]["options"] = recipe["data"]["held"]["options"] = {"keys": [None]}
    text = "options holds None, a NoneType, which TOML does not have; a recipe must be writable as TOML."
    assert problems(recipe) == [f"recipe: data.train.{text}", f"recipe: data.held.{text}"]


def test_json_schema_agrees_with_loading():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    assert check.is_valid(small()) and check.is_valid(tomllib.loads(dump(load(small()))))
    for wrong in [
        small(modle={}),
        small(run={"name": "a", "seed": -1}),
        small(machine={"compile": "maybe"}),
        small(machine={"timeout": 600}),
        small(machine={"timeout": "10 parsecs"}),
        small(checkpoint={"block": "8XiB"}),
        small(stages=[]),
    ]:
        assert not check.is_valid(wrong) and problems(wrong)


def test_json_schema_carries_the_help():
    schema = json_schema()
    assert schema["$defs"]["Optim"]["properties"]["lr"]["description"] == "peak learning rate"
    for name, section in schema["$defs"].items():
        for field, entry in section.get("properties", {}).items():
            assert entry.get("description"), f"{name}.{field} has no help"


def test_defaults_are_none_or_no_field_is_lost():
    """TOML has no null, so an unset field must have None as its default: else leaving it out would change it."""
    for _, section in walk(load(small())):
        for name, value in section:
            assert value is not None or type(section).model_fields[name].default is None, name
    assert Recipe.model_fields["model"].default is None
