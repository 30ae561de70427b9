"""Checkable properties of post-training that no part's own tests hold; docs/guide/properties.md lists all of them."""

import ast
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import small_post
from tests.parallel.compositions import parse
from tests.parallel.objectives import OBJECTIVES
from tests.parallel.posttrain import Layout, rows, teacher_of
from truestep.cli import verbs
from truestep.data.sample import make_tokenizer
from truestep.data.samples import render
from truestep.losses.base import open_loss
from truestep.models.load import load_model
from truestep.numerics.batch import Batch
from truestep.recipe.data import DataSection, TokenizerSection
from truestep.recipe.stage import Stage
from truestep.runlog.log import read

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "properties.md"


def test_every_test_that_the_page_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 25
    for file, name in named:
        tree = ast.parse((PAGE.parents[2] / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


RENDERED = "384261ad9f14f7d7"


def test_property_7_what_is_tokenised_is_the_same_in_every_version():
    """Ids and roles of rows of every format, hashed. If this changes, stores that exist are of another content, and a
    new version of their format is due."""
    tokenizer = make_tokenizer(
        TokenizerSection(kind="bytes", special=small_post.SPECIAL, chat_template="chatml"), [], Path()
    )
    digest = hashlib.sha256()
    for format in ("messages", "prompt-completion", "preference", "labels", "steps"):
        section = DataSection(source="jsonl", path="none", format=format)
        for row in small_post.made_up(format, 5):
            for sample in (sample for unit in render(row, section, tokenizer) for sample in unit):
                digest.update(sample.ids.astype("<u4").tobytes() + sample.roles.tobytes() + bytes([sample.side % 256]))
    assert digest.hexdigest()[:16] == RENDERED


def first_loss(run_dir: Path) -> float:
    return next(r.data.loss for r in read(run_dir) if r.kind == "step")


BEGINNINGS = {
    "precomputed": {},
    "online": {"preference": {"reference": "online"}},
    "adapters": {"lora": {"rank": 4}},
    "adapters, online": {"lora": {"rank": 4}, "preference": {"reference": "online"}},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "precomputed" else pytest.mark.slow) for case in BEGINNINGS]
)
def test_properties_11_and_14_the_first_loss_of_dpo_is_ln_2(case, tmp_path):
    body = small_post.recipe(tmp_path, "preference", steps=1, **BEGINNINGS[case])
    assert first_loss(verbs.run(body).directory) == pytest.approx(math.log(2), abs=1e-7)


def metrics_of(name: str, batch: Batch) -> dict[str, float]:
    """Sums of a loss on a batch, by the model of a teacher."""
    one = parse("context=32")
    stage = {"name": "x", "data": "x", "context": 32, "tokens": 32, "batch_tokens": 32} | OBJECTIVES[name].stage
    loss = open_loss(Stage(**stage), 7)
    out = teacher_of(one)(batch.tokens_BT, batch.positions_BT, batch.documents_BT, head=lambda out: loss(out, batch))
    return {metric: float(value) for metric, value in out.metrics.items()}


@pytest.mark.parametrize("name", ["dpo", "ipo", "length-normalised", "simpo"])
def test_property_13_swapping_the_answers_negates_the_margin_exactly(name):
    batch = rows(parse("context=32"), name, Layout(together=2))
    swapped = replace(batch, columns=batch.columns | {"side": -batch.columns["side"]})
    straight, turned = metrics_of(name, batch), metrics_of(name, swapped)
    assert straight["margin"] == -turned["margin"] != 0.0
    assert (straight["reward_chosen"], straight["reward_rejected"]) == (
        turned["reward_rejected"],
        turned["reward_chosen"],
    )


def test_property_15_both_rewards_are_logged_and_both_falling_is_counted():
    batch = rows(parse("context=32"), "dpo", Layout(together=2))
    low, high = ({"reference": torch.where(batch.labels_BT >= 0, value, 0.0)} for value in (-99.0, -1e-3))
    found = metrics_of("dpo", replace(batch, columns=batch.columns | high))
    assert found["reward_chosen"] < 0 and found["reward_rejected"] < 0 and found["both_fell"] == 8
    assert metrics_of("dpo", replace(batch, columns=batch.columns | low))["both_fell"] == 0


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> tuple[Path, Path]:
    """(the model that a stage started from, the one that it made)."""
    folder = tmp_path_factory.mktemp("tuned")
    made = verbs.run(small_post.recipe(folder, "sft", steps=2))
    return folder / "base", made.models["tuned"]


def test_property_53_an_exported_model_is_loaded_as_it_is(tuned):
    base, made = tuned
    ids = torch.randint(0, 250, (2, 20), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    places = torch.arange(20).expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(load_model(made)(ids, places), theirs(ids).logits, atol=1e-5, rtol=1e-4)
    tokenizer, before = (AutoTokenizer.from_pretrained(place) for place in (made, base))
    assert tokenizer.chat_template == before.chat_template and "im_start" in str(tokenizer.chat_template)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (before.pad_token_id, before.eos_token_id)
    config, first = (json.loads((place / "config.json").read_text()) for place in (made, base))
    assert config["tie_word_embeddings"] == first["tie_word_embeddings"]
    ends = json.loads((made / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in (ends if isinstance(ends, list) else [ends])


def test_properties_51_and_54_tables_and_head_stay_and_a_quantised_model_is_another_one(tmp_path):
    outcome = verbs.run(small_post.recipe(tmp_path, "quantise", quantise={"group": 8}))
    made = outcome.models["tuned"]
    stored, before = load_file(made / "model.safetensors"), load_file(tmp_path / "base" / "model.safetensors")
    kept = {name for name in before if "embed" in name or "lm_head" in name or "norm" in name}
    assert kept <= stored.keys() and all(torch.equal(stored[name].float(), before[name]) for name in kept)
    replaced = {name for name in before if name not in stored}
    assert replaced and all("proj" in name for name in replaced)
    assert all(f"{name}_packed" in stored and f"{name}_scale" in stored for name in replaced)
    assert all(bool(x.any()) for x in stored.values())
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["weights"] and manifest["gate"]["verdict"] != "pass"
