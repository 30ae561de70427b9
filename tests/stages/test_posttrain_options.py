"""Every option of recipe/posttrain.py, each turned alone: something that the run leaves is otherwise."""

import hashlib
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import small_post
from truestep.cli import verbs
from truestep.recipe import posttrain
from truestep.recipe.section import Section
from truestep.runlog.log import read

LORA: dict[str, Any] = {"lora": {"rank": 4}}
DPO: dict[str, Any] = {"preference": {"kind": "dpo"}}
KTO: dict[str, Any] = {"format": "labels", "preference": {"kind": "kto"}}
STEPS: dict[str, Any] = {"format": "steps", "reward": {"kind": "steps"}}
TEACHER: dict[str, Any] = {"teacher": "BASE2"}
GPTQ: dict[str, Any] = {"method": "gptq", "calibration": "train", "group": 8}

Turned = tuple[str, dict[str, Any], dict[str, Any]]
"""(kind of stage, fields of the stage, the same with one option turned)."""

OPTIONS: dict[str, Turned] = {
    "Sft.loss_on": ("sft", {"format": "turns"}, {"format": "turns", "sft": {"loss_on": "last"}}),
    "Sft.weighting": ("sft", {}, {"sft": {"weighting": "sample"}}),
    "Lora.rank": ("sft", LORA, {"lora": {"rank": 8}}),
    "Lora.alpha": ("sft", LORA, {"lora": {"rank": 4, "alpha": 64}}),
    "Lora.rslora": ("sft", LORA, {"lora": {"rank": 4, "rslora": True}}),
    "Lora.dropout": ("sft", LORA, {"lora": {"rank": 4, "dropout": 0.5}}),
    "Lora.targets": ("sft", LORA, {"lora": {"rank": 4, "targets": ["mlp"]}}),
    "Lora.base": ("sft", LORA, {"lora": {"rank": 4, "base": "int8"}}),
    "Lora.merge": ("sft", LORA, {"lora": {"rank": 4, "merge": False}}),
    "Preference.kind": ("preference", DPO, {"preference": {"kind": "ipo"}}),
    "Preference.beta": ("preference", DPO, {"preference": {"beta": 0.5}}),
    "Preference.label_smoothing": (
        "preference",
        {"preference": {"kind": "robust", "label_smoothing": 0.1}},
        {"preference": {"kind": "robust", "label_smoothing": 0.3}},
    ),
    "Preference.margin": (
        "preference",
        {"preference": {"kind": "simpo"}},
        {"preference": {"kind": "simpo", "margin": 1.0}},
    ),
    "Preference.desirable": ("preference", KTO, {"format": "labels", "preference": {"kind": "kto", "desirable": 2.0}}),
    "Preference.undesirable": (
        "preference",
        KTO,
        {"format": "labels", "preference": {"kind": "kto", "undesirable": 2.0}},
    ),
    "Preference.kl_pairs": ("preference", KTO, {"format": "labels", "preference": {"kind": "kto", "kl_pairs": 2}}),
    "Preference.sft": ("preference", DPO, {"preference": {"sft": 0.5}}),
    "Reward.kind": ("reward_model", {}, STEPS),
    "Reward.margins": ("reward_model", {"format": "margins"}, {"format": "margins", "reward": {"margins": True}}),
    "Reward.center": ("reward_model", {}, {"reward": {"center": 0.5}}),
    "Distill.teacher": ("distill", {"distill": TEACHER}, {"distill": {"teacher": "BASE"}}),
    "Distill.student": (
        "distill",
        {"distill": TEACHER},
        {"distill": TEACHER | {"student": small_post.MODEL | {"num_layers": 1}}, "start": "init"},
    ),
    "Distill.divergence": ("distill", {"distill": TEACHER}, {"distill": TEACHER | {"divergence": "reverse"}}),
    "Distill.mix": (
        "distill",
        {"distill": TEACHER | {"divergence": "js"}},
        {"distill": TEACHER | {"divergence": "js", "mix": 0.2}},
    ),
    "Distill.temperature": ("distill", {"distill": TEACHER}, {"distill": TEACHER | {"temperature": 2.0}}),
    "Distill.hard": ("distill", {"distill": TEACHER}, {"distill": TEACHER | {"hard": 0.5}}),
    "Distill.top_k": ("distill", {"distill": TEACHER}, {"distill": TEACHER | {"top_k": 4}}),
    "Quantise.scheme": ("quantise", {"quantise": {"group": 8}}, {"quantise": {"scheme": "int8"}}),
    "Quantise.method": ("quantise", {"quantise": {"group": 8}}, {"quantise": GPTQ}),
    "Quantise.group": ("quantise", {"quantise": {"group": 8}}, {"quantise": {"group": 16}}),
    "Quantise.symmetric": ("quantise", {"quantise": {"group": 8}}, {"quantise": {"group": 8, "symmetric": False}}),
    "Quantise.calibration": ("quantise", {"quantise": GPTQ}, {"quantise": GPTQ | {"calibration": "other"}}),
    "Quantise.calibration_rows": (
        "quantise",
        {"context": 64, "quantise": GPTQ},
        {"context": 64, "quantise": GPTQ | {"calibration_rows": 2}},
    ),
    "Quantise.act_order": ("quantise", {"quantise": GPTQ}, {"quantise": GPTQ | {"act_order": False}}),
    "Quantise.damp": ("quantise", {"quantise": GPTQ}, {"quantise": GPTQ | {"damp": 10.0}}),
    "Quantise.keep": ("quantise", {"quantise": {"group": 8}}, {"quantise": {"group": 8, "keep": ["*down*"]}}),
    "Quantise.format": ("quantise", {"quantise": {"group": 32}}, {"quantise": {"group": 32, "format": "gguf"}}),
    "Remember.kl": ("sft", {}, {"remember": {"kl": 1.0}}),
    "Remember.replay": ("sft", {}, {"remember": {"replay": [{"data": "other"}]}}),
    "Remember.ema": ("sft", {}, {"remember": {"ema": 0.9}}),
}
SAME_RESULT: dict[str, Turned] = {
    "Preference.reference": ("preference", DPO, {"preference": {"reference": "online"}}),
    "Distill.logits": (
        "distill",
        {"distill": TEACHER | {"top_k": 4}},
        {"distill": TEACHER | {"top_k": 4, "logits": "stored"}},
    ),
}
"""Options of how a thing is computed: the result is the same but for rounding, and a store lies there or not."""


@cache
def folder() -> Path:
    """With two models, and rows of every format."""
    made = Path(mkdtemp())
    small_post.save_base(made / "base")
    small_post.save_base(made / "base2", seed=1)
    return made


@cache
def outcome(kind: str, fields: str) -> Path:
    """The directory of a run of two steps."""
    for name in ("base", "base2"):
        fields = fields.replace(f'"{name.upper()}"', json.dumps(str(folder() / name)))
    run_name = hashlib.sha256(f"{kind} {fields}".encode()).hexdigest()[:12]
    body = small_post.recipe(folder(), kind, run_name, steps=2, **json.loads(fields))
    found = verbs.run(body)
    assert found.reason == "finished"
    return found.directory


def run(kind: str, fields: dict[str, Any]) -> Path:
    return outcome(kind, json.dumps(fields))


def left(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the models that were made, by file and name; of files of another kind, their bytes."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted((run_dir / "models").rglob("*")):
        if file.suffix == ".safetensors":
            found |= {f"{file.relative_to(run_dir)} {name}": x for name, x in load_file(file).items()}
        elif file.suffix == ".gguf":
            found[str(file.relative_to(run_dir))] = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    return found


def losses(run_dir: Path) -> list[float]:
    return [r.data.loss for r in read(run_dir) if r.kind == "step"]


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].shape == b[n].shape and torch.equal(a[n], b[n]) for n in a)


def all_options() -> set[str]:
    sections = [one for one in vars(posttrain).values() if isinstance(one, type) and issubclass(one, Section)]
    own = [one for one in sections if one.__module__ == posttrain.__name__]
    return {f"{one.__name__}.{field}" for one in own for field in one.model_fields}


def test_no_option_is_left_out():
    assert all_options() == OPTIONS.keys() | SAME_RESULT.keys()


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_option_changes_the_model_that_is_made(option):
    kind, plain, turned = OPTIONS[option]
    assert not alike(left(run(kind, plain)), left(run(kind, turned)))


@pytest.mark.slow
@pytest.mark.parametrize("option", SAME_RESULT)
def test_option_of_where_a_number_comes_from(option):
    kind, plain, turned = SAME_RESULT[option]
    one, other = run(kind, plain), run(kind, turned)
    assert losses(one) == pytest.approx(losses(other), rel=1e-4)
    a, b = left(one), left(other)
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)
