"""The three digests: which field belongs where, and what a change does."""

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipe.small import small
from truestep.recipe import digests
from truestep.recipe.load import load

WHERE = {
    "run.name": st.sampled_from(["a", "b", "c1"]),
    "run.dir": st.sampled_from(["runs", "/tmp/x"]),
    "run.resume": st.sampled_from(["auto", "never"]),
    "machine.processes": st.integers(1, 9),
    "machine.mesh.dp_replicate": st.integers(1, 9),
    "machine.prefetch": st.integers(0, 9),
    "machine.timeout": st.sampled_from(["1m", "2h"]),
    "machine.cache": st.sampled_from(["~/x", "y"]),
    "checkpoint.every": st.integers(0, 9),
    "checkpoint.asynchronous": st.booleans(),
    "checkpoint.url": st.sampled_from(["s3://bucket/a", "folder"]),
    "ledger.pue": st.floats(1, 3),
    "ledger.grid_region": st.sampled_from(["DE", "SE"]),
    "data.train.path": st.sampled_from(["a", "b"]),
    "stages.base.sample.prompts": st.sampled_from(["['a']", "['b', 'c']"]),
}
BITS = {
    "machine.microbatch_rows": st.sampled_from([1, 2, 4]),
    "machine.compile": st.just("true"),
    "machine.precision": st.sampled_from(["float32", "bfloat16"]),
    "machine.threads": st.integers(1, 9),
    "machine.head_chunk_tokens": st.integers(1, 99),
}
WHAT = {
    "run.seed": st.integers(1, 9),
    "model.num_layers": st.sampled_from([1, 3]),
    "stages.base.tokens": st.integers(2 * 10**6, 10**7),
    "stages.base.optim.lr": st.floats(1e-6, 1e-4),
    "stages.base.gate.max_bits_per_byte": st.floats(0.1, 1.9),
    "stages.base.mask_documents": st.just("false"),
    "data.train.dedup": st.just("exact"),
    "tokenizer.kind": st.just("train-bpe"),
}


def _base():
    recipe = small()
    recipe["data"]["train"] |= {"source": "text", "path": "old"}
    return recipe


def _changes(table):
    pairs = st.sampled_from(sorted(table)).flatmap(lambda path: table[path].map(lambda value: f"{path}={value}"))
    return st.lists(pairs, min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(_changes(WHERE))
def test_a_changed_where_changes_neither_what_nor_bits(overrides):
    before, after = load(_base()), load(_base(), overrides)
    assert digests.what(after) == digests.what(before) and digests.bits(after) == digests.bits(before)
    assert digests.changed(digests.what_fields(before), digests.what_fields(after)) == []
    assert (digests.where(after) == digests.where(before)) == (after == before)


@settings(max_examples=40, deadline=None)
@given(_changes(BITS))
def test_changed_bits_change_bits_alone(overrides):
    before, after = load(_base()), load(_base(), overrides)
    assert digests.what(after) == digests.what(before) and digests.where(after) == digests.where(before)
    assert digests.bits(after) != digests.bits(before)


@settings(max_examples=40, deadline=None)
@given(_changes(WHAT))
def test_a_changed_what_is_seen_and_named(overrides):
    before, after = load(_base()), load(_base(), overrides)
    assert digests.what(after) != digests.what(before)
    named = {text.split(":")[0] for text in digests.changed(digests.what_fields(before), digests.what_fields(after))}
    assert named == {override.split("=")[0] for override in overrides}


def test_every_field_is_in_exactly_one_digest():
    recipe = load(_base())
    groups = [digests.what_fields(recipe), digests.where_fields(recipe), digests.bits_fields(recipe)]
    paths = [path for group in groups for path in group]
    assert len(paths) == len(set(paths))
    assert {"run.name", "run.dir", "data.train.path", "machine.processes", "checkpoint.every_time"} <= set(groups[1])
    assert {"stages.base.optim.muon_dtype", "machine.compile"} <= set(groups[2])
    assert not any(path.startswith(("machine", "checkpoint", "ledger")) for path in groups[0])


def test_the_digest_is_sha256_over_canonical_json():
    recipe = load(_base())
    text = json.dumps(digests.what_fields(recipe), sort_keys=True, separators=(",", ":"))
    assert digests.what(recipe) == hashlib.sha256(text.encode()).hexdigest()
    assert digests.short(digests.what(recipe)) == digests.what(recipe)[:16]
    assert json.loads(text) == digests.what_fields(recipe)


def test_the_digest_does_not_depend_on_how_the_recipe_is_written():
    spelled = _base()
    spelled["stages"][0] |= {"tokens": 1_000_000, "batch_tokens": "8192", "optim": {"lr": "3e-4"}}
    shuffled = dict(reversed(spelled.items())) | {"data": dict(reversed(spelled["data"].items()))}
    assert digests.what(load(spelled)) == digests.what(load(_base())) == digests.what(load(shuffled))


def test_the_order_of_stages_and_of_a_mixture_counts():
    recipe = _base()
    recipe["stages"].append(recipe["stages"][0] | {"name": "next"})
    swapped = recipe | {"stages": recipe["stages"][::-1]}
    assert digests.what(load(recipe)) != digests.what(load(swapped))
    assert "stages: " in digests.changed(digests.what_fields(load(recipe)), digests.what_fields(load(swapped)))[0]


def test_changed_names_old_and_new_values():
    before = load(_base())
    after = load(_base(), ["stages.base.optim.lr=1e-3", "stages.base.ramp=[{after=8192, batch_tokens='16K'}]"][:1])
    assert digests.changed(digests.what_fields(before), digests.what_fields(after)) == [
        "stages.base.optim.lr: 0.0003 → 0.001"
    ]
    assert digests.changed({"a": 1}, {"b": "x"}) == ["a: 1 → (absent)", 'b: (absent) → "x"']
    assert digests.changed({"a": True}, {"a": 1}) == ["a: true → 1"]


@pytest.mark.parametrize("path", ["what", "where", "bits"])
def test_digests_are_hex(path):
    assert len(bytes.fromhex(getattr(digests, path)(load(_base())))) == 32
