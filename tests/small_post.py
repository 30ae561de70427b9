"""The smallest recipes of the stages after pretraining: a tiny chat model on disk, made-up rows of every format."""

import json
import random
from pathlib import Path
from typing import Any

from truestep.data.sample import make_tokenizer
from truestep.models.build import build_model, init_weights
from truestep.models.hf_save import save_hf
from truestep.models.load import tensors_of
from truestep.recipe.data import TokenizerSection
from truestep.recipe.model import ModelSection

SPECIAL = ["<|im_start|>", "<|im_end|>"]
CONTEXT, ROWS = 64, 8
"""Places of a row, rows of a step."""
MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def made_up(format: str, count: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """A task with known answers: a word is to be said backwards. Wrong answers are the word as it is."""
    source = random.Random(seed)
    words = ["".join(source.choices("abcdefgh", k=source.randint(2, 5))) for _ in range(count)]
    makers = {
        "text": lambda word: {"text": f"{word} backwards is {word[::-1]}"},
        "messages": lambda word: {"messages": [turn("user", word), turn("assistant", word[::-1])]},
        "turns": lambda word: {"messages": [turn("user", word), turn("assistant", word[::-1])] * 2},
        "prompt-completion": lambda word: {"prompt": word, "completion": word[::-1]},
        "preference": lambda word: {"prompt": word, "chosen": word[::-1] + ".", "rejected": word},
        "margins": lambda word: {"prompt": word, "chosen": word[::-1] + ".", "rejected": word, "margin": len(word)},
        "labels": lambda word: {"prompt": word, "completion": word[::-1], "label": word[0] < "e"},
        "steps": lambda word: {"prompt": word, "steps": [word[::-1], word], "labels": [True, False]},
    }
    return [makers[format](word) for word in words]


def write_rows(folder: Path, format: str, content: list[Any] | None = None) -> Path:
    """A JSONL file; strings are written as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{format}.jsonl"
    lines = [
        row if isinstance(row, str) else json.dumps(row) for row in (made_up(format) if content is None else content)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def save_base(folder: Path, *, template: str | None = "chatml", seed: int = 0, **changes: Any) -> Path:
    """A model directory with a byte tokenizer that knows turns."""
    section = TokenizerSection(kind="bytes", special=SPECIAL, chat_template=template)
    tokenizer = make_tokenizer(section, [], folder.parent / "cache")
    model_section = ModelSection(**(MODEL | changes)).resolved(tokenizer.vocab_size)
    model = build_model(model_section, tokenizer.vocab_size).to_empty(device="cpu")
    init_weights(model, seed)
    save_hf(folder, tensors_of(model), model_section)
    tokenizer.save(folder)
    return folder


FORMATS = {
    "sft": "messages",
    "preference": "preference",
    "reward_model": "preference",
    "distill": "messages",
    "quantise": "messages",
}


def corpus(folder: Path, kind: str) -> dict[str, Any]:
    """A data section of these rows; a kind is a format, or a variety of one."""
    file = folder / "rows" / f"{kind}.jsonl"
    if not file.exists():
        write_rows(folder / "rows", kind)
    format = {"turns": "messages", "margins": "preference"}.get(kind, kind)
    return {"source": "jsonl", "path": str(file), "format": format}


def recipe(folder: Path, kind: str, name: str = "small", *, format: str = "", steps: int = 6, **changes: Any) -> dict:
    """A recipe of one stage "tuned" of this kind, from folder/base. `changes` replace fields of the stage. Where they
    name data "other", that is there too."""
    if not (folder / "base").exists():
        save_base(folder / "base")
    format = format or FORMATS[kind]
    stage: dict[str, Any] = {
        "name": "tuned",
        "kind": kind,
        "start": str(folder / "base"),
        "gate": {"kind": "none", "reason": "a test"},
    }
    if kind != "quantise":
        stage |= {
            "data": "train",
            "context": CONTEXT,
            "tokens": steps * ROWS * CONTEXT,
            "batch_tokens": ROWS * CONTEXT,
            "optim": {"lr": 3e-3, "schedule": {"kind": "constant", "warmup": 0}},
        }
    if kind == "distill":
        stage["distill"] = {"teacher": str(folder / "base")}
    stage |= changes
    named = json.dumps(stage)
    data = {
        key: corpus(folder, rows) for key, rows in {"train": format, "other": "turns"}.items() if f'"{key}"' in named
    }
    return {
        "run": {"name": name, "dir": str(folder / "runs"), "seed": 3},
        "tokenizer": {"kind": "file", "path": str(folder / "base")},
        "data": data,
        "stages": [stage],
        "machine": {
            "microbatch_rows": 2,
            "threads": 1,
            "device": "cpu",
            "precision": "float32",
            "data_workers": 1,
            "cache": str(folder / "cache"),
        },
        "checkpoint": {"every": 2, "every_time": "1h", "drill_every": "0s"},
        "ledger": {"peak_flops": 1e11},
    }
