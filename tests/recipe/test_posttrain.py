"""Recipes of the stages after pretraining that do not add up: one sentence each, with the field and the remedy."""

from typing import Any

import pytest

from truestep.errors import RecipeError
from truestep.recipe.load import load

DATA = {"source": "jsonl", "path": "rows.jsonl"}


def recipe(kind: str, format: str = "messages", **changes: Any) -> dict[str, Any]:
    """A sound recipe of one stage; `data` and `machine` among the changes are added to the recipe's, the others replace
    fields of the stage."""
    data = {"train": DATA | {"format": format} | changes.pop("data", {})}
    machine = changes.pop("machine", {})
    stage: dict[str, Any] = {
        "name": "tuned",
        "kind": kind,
        "start": "model",
        "gate": {"kind": "none", "reason": "test"},
    }
    if kind != "quantise":
        stage |= {"data": "train", "context": 64, "tokens": 4096, "batch_tokens": 512}
        stage |= {"optim": {"schedule": {"kind": "constant", "warmup": 0}}}
    elif "calibration" not in changes.get("quantise", {}):
        data = {}
    stage = {name: value for name, value in (stage | changes).items() if value is not None}
    return {
        "run": {"name": "small"},
        "tokenizer": {"kind": "start"},
        "data": data,
        "stages": [stage],
        "machine": machine,
    }


SOUND = {
    "sft": recipe("sft"),
    "completions": recipe("sft", "prompt-completion", data={"fields": {"prompt": "question"}, "max_refused": 0.1}),
    "dropped": recipe("sft", data={"too_long": "drop"}),
    "epochs": recipe("sft", tokens=None, epochs=2.0),
    "dpo": recipe("preference", "preference"),
    "kto": recipe("preference", "labels", preference={"kind": "kto"}),
    "pairs": recipe("reward_model", "preference"),
    "steps": recipe("reward_model", "steps", reward={"kind": "steps"}),
    "distill": recipe("distill", distill={"teacher": "other"}),
    "int4": recipe("quantise"),
    "gptq": recipe("quantise", "text", quantise={"method": "gptq", "calibration": "train"}),
}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tokens and epochs": (recipe("sft", epochs=1.0), ["stages.tuned.tokens and epochs are both set", "remove one"]),
    "neither": (recipe("sft", tokens=None), ["stages.tuned.tokens is missing", "or epochs"]),
    "text": (recipe("sft", "text"), ['data.train.format is "text"', 'kind = "sft"', '"messages"']),
    "pairs for sft": (recipe("sft", "preference"), ['format is "preference"', '"messages" or "prompt-completion"']),
    "pairs for KTO": (recipe("preference", "preference", preference={"kind": "kto"}), ['"kto"', 'takes "labels"']),
    "labels for DPO": (recipe("preference", "labels"), ['"dpo"', 'takes "preference"']),
    "steps for pairs": (recipe("reward_model", "steps"), ['"pairs"', 'takes "preference"']),
    "pairs for steps": (recipe("reward_model", "preference", reward={"kind": "steps"}), ['takes "steps"']),
    "missing teacher": (recipe("distill"), ["stages.tuned.distill is missing", "teacher"]),
    "later teacher": (
        recipe("distill", distill={"teacher": "stage:tuned"}),
        ["teacher is", "no earlier stage"],
    ),
    "fresh teacher": (recipe("distill", distill={"teacher": "init"}), ['teacher is "init"', "name a model"]),
    "whole vocabulary stored": (
        recipe("distill", distill={"teacher": "other", "logits": "stored"}),
        ["top_k is 0", "likeliest tokens only", "set it to"],
    ),
    "GPTQ without data": (recipe("quantise", quantise={"method": "gptq"}), ["calibration is missing", "name a [data"]),
    "static without data": (
        recipe("quantise", quantise={"scheme": "fp8-static"}),
        ["calibration is missing", "fp8-static"],
    ),
    "unknown calibration": (
        recipe("quantise", "text", quantise={"method": "gptq", "calibration": "trian"}),
        ["calibration names 'trian'", "did you mean 'train'"],
    ),
    "no group": (recipe("quantise", quantise={"group": 0}), ["quantise.group is 0", "-1"]),
    "groups for GGUF": (recipe("quantise", quantise={"format": "gguf"}), ["group is 128", "set it to 32"]),
    "fp8 for GGUF": (
        recipe("quantise", quantise={"scheme": "fp8", "format": "gguf"}),
        ['scheme is "fp8"', 'format = "gguf" does not have', "take int8"],
    ),
    "dropout beside a reference": (
        recipe("preference", "preference", lora={"dropout": 0.1}),
        ["lora.dropout is 0.1", "without dropout", "set it to 0"],
    ),
    "unknown replay": (recipe("sft", remember={"replay": [{"data": "old"}]}), ["replay names 'old'", "known: train"]),
    "scores in parts of rows": (
        recipe("reward_model", "preference", machine={"mesh": {"cp": 2}}),
        ["machine.mesh.cp is 2", "whole rows", "set it to 1"],
    ),
    "split conversations": (recipe("sft", data={"too_long": "split"}), ['too_long is "split"', "stay whole"]),
}
UNUSED = {
    "stages.tuned.sft": recipe("preference", "preference", sft={"weighting": "sample"}),
    "stages.tuned.preference.margin": recipe("preference", "preference", preference={"margin": 0.3}),
    "stages.tuned.preference.label_smoothing": recipe("preference", "preference", preference={"label_smoothing": 0.1}),
    "stages.tuned.preference.desirable": recipe("preference", "preference", preference={"desirable": 2.0}),
    "stages.tuned.preference.reference": recipe(
        "preference", "preference", preference={"kind": "simpo", "reference": "online"}
    ),
    "stages.tuned.reward.margins": recipe("reward_model", "steps", reward={"kind": "steps", "margins": True}),
    "stages.tuned.distill.mix": recipe("distill", distill={"teacher": "other", "mix": 0.3}),
    "stages.tuned.remember": recipe("reward_model", "preference", remember={"kl": 0.1}),
    "stages.tuned.mask_documents": recipe("sft", mask_documents=False),
    "stages.tuned.loss.z_loss": recipe("preference", "preference", loss={"z_loss": 1e-3}),
    "stages.tuned.quantise.calibration": recipe("quantise", "text", quantise={"calibration": "train"}),
    "stages.tuned.quantise.method": recipe("quantise", quantise={"scheme": "fp8", "method": "gptq"}),
    "stages.tuned.quantise.group": recipe("quantise", quantise={"scheme": "int8", "group": 32}),
    "stages.tuned.lora": recipe("quantise", lora={"rank": 4}),
    "data.train.packing": recipe("sft", data={"packing": "split"}),
    "data.train.text_field": recipe("sft", data={"text_field": "body"}),
    "tokenizer.special": recipe("sft") | {"tokenizer": {"kind": "start", "special": ["<x>"]}},
}


def sentences(body: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(body)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_recipe_is_taken(case):
    load(SOUND[case])


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_add_up_is_said_in_one_sentence(case):
    body, parts = REFUSED[case]
    (sentence,) = sentences(body)
    assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize("field", UNUSED)
def test_an_option_without_effect_is_refused(field):
    (sentence,) = sentences(UNUSED[field])
    assert f"{field} is set but will not be used" in sentence and sentence.endswith("remove it."), sentence


def test_fresh_weights_are_neither_adapted_nor_quantised():
    fresh = {"model": {}, "tokenizer": {"kind": "bytes"}}
    (sentence,) = sentences(recipe("sft", lora={"rank": 4}, start="init") | fresh)
    assert "lora adapts frozen weights" in sentence and "start from a model" in sentence
    (sentence,) = sentences(recipe("quantise", start="init") | fresh)
    assert 'start is "init"' in sentence and "needs a model; name one" in sentence
