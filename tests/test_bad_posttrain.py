"""Bad input of the stages after pretraining, through the command line: one sentence, exit code 2, nothing half-made."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import small_post
from tests.refusals import files, truestep, write_recipe
from tests.small_post import turn
from truestep.cli import verbs
from truestep.data.tokenizer import bytes_tokenizer


def refused(capsys, folder: Path, body: dict[str, Any], *parts: str) -> None:
    """`truestep run` refuses it; what lay there before is as it was, and there is no model."""
    file = write_recipe(folder, body)
    given = {name: content for name, content in files(folder).items() if name.split("/")[0] in ("base", "rows")}
    ended = truestep(capsys, "run", file)
    ended.refused(*parts)
    after = files(folder)
    assert {name: after.get(name) for name in given} == given
    assert not any("/models/" in name or name.endswith(".partial") for name in after)


# Rows

ROWS: dict[str, tuple[str, Any, list[str]]] = {
    "no answer": ("messages", {"messages": [turn("user", "a")]}, ["messages", "assistant"]),
    "unknown role": (
        "messages",
        {"messages": [turn("usr", "a"), turn("assistant", "b")]},
        ['role "usr" is unknown', "user"],
    ),
    "no messages": ("messages", {"messages": []}, ["messages"]),
    "text for messages": ("messages", {"messages": "hello"}, ["messages", "hello"]),
    "number for text": ("messages", {"messages": [turn("user", "a"), {"role": "assistant", "content": 3}]}, ["3"]),
    "other field": ("messages", {"conversation": []}, ["'messages'", "conversation", "fields"]),
    "no completion": ("prompt-completion", {"prompt": "a"}, ["'completion'", "fields"]),
    "empty prompt and completion": ("prompt-completion", {"prompt": "", "completion": ""}, ["line 2"]),
    "no rejected answer": ("preference", {"prompt": "a", "chosen": "b"}, ["'rejected'", "fields"]),
    "equal answers": ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, ["chosen", "rejected"]),
    "a word for a label": ("labels", {"prompt": "a", "completion": "b", "label": "good"}, ["label", '"good"']),
    "fewer labels than steps": ("steps", {"prompt": "a", "steps": ["b", "c"], "labels": [True]}, ["labels", "steps"]),
    "no object": ("messages", "[1, 2]", ["line 2"]),
    "NaN for a margin": (
        "margins",
        '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}',
        ["'margin'", "NaN", "repair it"],
    ),
}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("sft", {}),
    "prompt-completion": ("sft", {}),
    "preference": ("preference", {}),
    "margins": ("reward_model", {"reward": {"margins": True}}),
    "labels": ("preference", {"preference": {"kind": "kto"}}),
    "steps": ("reward_model", {"reward": {"kind": "steps"}}),
}


@pytest.mark.parametrize("case", ROWS)
def test_row(case, capsys, tmp_path):
    format, row, parts = ROWS[case]
    good = small_post.made_up(format, 3)
    small_post.write_rows(tmp_path / "rows", format, [good[0], row, *good[1:]])
    kind, options = STAGES[format]
    refused(
        capsys, tmp_path, small_post.recipe(tmp_path, kind, format=format, **options), f"{format}.jsonl, line 2", *parts
    )


def test_rows_that_are_all_too_long(capsys, tmp_path):
    small_post.write_rows(
        tmp_path / "rows", "messages", [{"messages": [turn("user", "a" * 99), turn("assistant", "b")]}]
    )
    refused(capsys, tmp_path, small_post.recipe(tmp_path, "sft"), "no unit", "64 tokens", "raise context")


def test_refused_rows_are_counted_up_to_the_limit(capsys, tmp_path):
    """Property 8: what is left out is counted and said, and a limit holds."""
    bad = {"messages": [turn("user", "a")]}
    small_post.write_rows(tmp_path / "rows", "messages", [*small_post.made_up("messages", 18), bad, bad])
    body = small_post.recipe(tmp_path, "sft")
    body["data"]["train"] |= {"max_refused": 0.05}
    refused(capsys, tmp_path, body, "max_refused", "messages.jsonl")
    body["data"]["train"] |= {"max_refused": 0.2}
    ended = truestep(capsys, "run", write_recipe(tmp_path, body))
    assert ended.code == 0, ended.err
    assert "refused" in ended.err + ended.out


# Models, tokenizers and templates


def test_tokenizer_without_a_template(capsys, tmp_path):
    small_post.save_base(tmp_path / "base", template=None)
    refused(
        capsys, tmp_path, small_post.recipe(tmp_path, "sft"), "no chat template", "tokenizer.chat_template", "chatml"
    )


COUNTING = (
    "{{ messages | length }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {
    "without generation prompt": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}",
        ["generation prompt"],
    ),
    "that does not parse": ("{% for m in messages %}{{ m.role }}", ["template"]),
    "that raises": ("{{ raise_exception('roles must alternate') }}", ["roles must alternate"]),
    "that counts turns first": (COUNTING, ["template"]),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_template(case, capsys, tmp_path):
    text, parts = TEMPLATES[case]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "own.jinja").write_text(text)
    body = small_post.recipe(tmp_path, "sft")
    body["tokenizer"] |= {"chat_template": str(tmp_path / "rows" / "own.jinja")}
    refused(capsys, tmp_path, body, *parts)


def test_template_that_is_not_there(capsys, tmp_path):
    body = small_post.recipe(tmp_path, "sft")
    body["tokenizer"] |= {"chat_template": str(tmp_path / "none.jinja")}
    refused(capsys, tmp_path, body, "none.jinja", "cannot be read", "write chatml")


def test_tokenizer_that_is_larger_than_the_model(capsys, tmp_path):
    small_post.save_base(tmp_path / "base")
    bytes_tokenizer([*small_post.SPECIAL, *(f"<|more{n}|>" for n in range(9))]).save(tmp_path / "rows")
    body = small_post.recipe(tmp_path, "sft", format="prompt-completion")
    body["tokenizer"]["path"] = str(tmp_path / "rows")
    refused(capsys, tmp_path, body, "268 ids", "259")


def test_start_without_a_tokenizer(capsys, tmp_path):
    base = small_post.save_base(tmp_path / "base")
    for file in base.glob("tokenizer*"):
        file.unlink()
    body = small_post.recipe(tmp_path, "sft") | {"tokenizer": {"kind": "start"}}
    refused(capsys, tmp_path, body, "base", "tokenizer.json")


def test_the_tokenizer_of_the_start(capsys, tmp_path):
    body = small_post.recipe(tmp_path, "sft", steps=1) | {"tokenizer": {"kind": "start"}}
    assert truestep(capsys, "run", write_recipe(tmp_path, body)).code == 0
    made = tmp_path / "runs" / "small" / "models" / "tuned"
    assert json.loads((made / "tokenizer.json").read_text()) == json.loads(
        (tmp_path / "base" / "tokenizer.json").read_text()
    )


# Teachers


def test_teacher_of_another_vocabulary(capsys, tmp_path):
    small_post.save_base(tmp_path / "base")
    small_post.save_base(tmp_path / "rows" / "teacher", vocab_size=300)
    body = small_post.recipe(tmp_path, "distill", distill={"teacher": str(tmp_path / "rows" / "teacher")})
    refused(capsys, tmp_path, body, "teacher", "300 ids", "259")


def test_teacher_that_is_not_there(capsys, tmp_path):
    body = small_post.recipe(tmp_path, "distill", distill={"teacher": str(tmp_path / "none")})
    refused(capsys, tmp_path, body, "distill.teacher", "none", "no model directory")


def with_nan(folder: Path) -> Path:
    """A model with one weight that is no number."""
    base = small_post.save_base(folder)
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    return base


def test_start_and_reference_that_are_no_numbers(capsys, tmp_path):
    with_nan(tmp_path / "base")
    for kind in ("sft", "preference"):
        body = small_post.recipe(tmp_path, kind)
        refused(capsys, tmp_path, body, "base: blocks.0.mlp.up.weight holds NaN", "name another one")


@pytest.mark.parametrize("logits", ["online", "stored"])
def test_teacher_that_is_no_number(logits, capsys, tmp_path):
    small_post.save_base(tmp_path / "base")
    options = {"teacher": str(with_nan(tmp_path / "rows" / "teacher")), "logits": logits}
    body = small_post.recipe(tmp_path, "distill", distill=options | ({"top_k": 4} if logits == "stored" else {}))
    refused(capsys, tmp_path, body, "teacher: blocks.0.mlp.up.weight holds NaN", "name another one")


# Quantisation


def test_quantising_a_quantised_model(capsys, tmp_path):
    body = small_post.recipe(tmp_path, "quantise", quantise={"group": 8})
    assert truestep(capsys, "run", write_recipe(tmp_path, body)).code == 0
    small = tmp_path / "runs" / "small" / "models" / "tuned"
    again = small_post.recipe(tmp_path, "quantise", "again", quantise={"scheme": "int8"}, start=str(small))
    truestep(capsys, "run", write_recipe(tmp_path, again)).refused("quantised already", "start from what it was made")
    assert not (tmp_path / "runs" / "again" / "models").exists()


def test_start_that_is_stored_in_a_way_of_others(capsys, tmp_path):
    config = small_post.save_base(tmp_path / "base") / "config.json"
    values = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(values))
    refused(capsys, tmp_path, small_post.recipe(tmp_path, "sft"), "base/config.json", "quantization_config", "fp8")
    assert not (tmp_path / "runs").exists()


QUANTISED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "group that does not divide": ({"group": 24}, ["groups of 24 do not divide", "quantise.group"]),
    "pattern of nothing": ({"group": 8, "keep": ["*dwon*"]}, ["'*dwon*'", "correct the pattern"]),
    "nothing left": ({"group": 8, "keep": ["*"]}, ["no weight", "shorten"]),
}


@pytest.mark.parametrize("case", QUANTISED)
def test_quantisation(case, capsys, tmp_path):
    options, parts = QUANTISED[case]
    refused(capsys, tmp_path, small_post.recipe(tmp_path, "quantise", quantise=options), *parts)


def test_quantising_what_is_no_number(capsys, tmp_path):
    with_nan(tmp_path / "base")
    body = small_post.recipe(tmp_path, "quantise", quantise={"group": 8})
    refused(capsys, tmp_path, body, "up", "not finite")


GPTQ = {"method": "gptq", "group": 8, "calibration": "train"}


def test_calibration_without_a_row(capsys, tmp_path):
    small_post.write_rows(tmp_path / "rows", "messages", [])
    refused(capsys, tmp_path, small_post.recipe(tmp_path, "quantise", quantise=GPTQ), "messages.jsonl", "empty")


def test_calibration_whose_rows_are_all_refused(capsys, tmp_path):
    small_post.write_rows(tmp_path / "rows", "messages", [{"messages": [turn("user", "a")]}])
    refused(capsys, tmp_path, small_post.recipe(tmp_path, "quantise", quantise=GPTQ), "messages.jsonl", "assistant")


# Adapters


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    """A folder with a model, "base", and its adapter, "adapter"."""
    folder = tmp_path_factory.mktemp("adapted")
    outcome = verbs.run(small_post.recipe(folder, "sft", steps=2, lora={"rank": 4}))
    shutil.copytree(outcome.models["tuned"] / "adapter", folder / "adapter")
    return folder


def renamed(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    named = {name.replace("base_model.model.model.", "base_model.model."): x for name, x in tensors.items()}
    save_file(named, adapter / "adapter_model.safetensors")


def halved(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    some = {name: x for name, x in tensors.items() if "layers.0" not in name or "q_proj" not in name}
    save_file(some, adapter / "adapter_model.safetensors")


def zeroed(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: torch.zeros_like(x) for name, x in tensors.items()}, adapter / "adapter_model.safetensors")


def without_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()


def of_another_kind(adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))


ADAPTERS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "renamed keys": (renamed, ["for which the model has no place", "rename the keys"]),
    "missing tensors": (halved, ["lacks", "attention.q.weight", "fetch it again"]),
    "no effect": (zeroed, ["changes nothing"]),
    "no weights": (without_weights, ["is no adapter", "does not exist"]),
    "another computation": (of_another_kind, ["use_dora", "merge that adapter"]),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_adapter(case, capsys, adapted, tmp_path):
    change, parts = ADAPTERS[case]
    shutil.copytree(adapted / "adapter", tmp_path / "adapter")
    change(tmp_path / "adapter")
    truestep(capsys, "sample", adapted / "base", "a", "--adapter", tmp_path / "adapter").refused(*parts)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"hidden_size": 48}, {"num_layers": 1}])
def test_adapter_of_another_model(changes, capsys, adapted, tmp_path):
    """Of other weights, whatever their shapes: the right shapes alone make it no adapter of this model."""
    other = small_post.save_base(tmp_path / "other", **changes)
    truestep(capsys, "sample", other, "a", "--adapter", adapted / "adapter").refused("adapter", "model")
