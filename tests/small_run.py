"""A whole run that takes a second or two: raw bytes of made-up text, a model of a few thousand weights."""

from pathlib import Path
from typing import Any

import numpy as np

WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "row",
    "of",
    "text",
    "and",
    "the",
    "loss",
    "of",
    "each",
    "step",
    "is",
    "a",
    "sum",
    "over",
    "targets",
    "divided",
    "once",
]


def write_text(folder: Path, documents: int = 30, seed: int = 0) -> Path:
    """Text files whose words follow no rule, so that no two rows are alike."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        words = random.choice(WORDS, size=int(random.integers(20, 120)))
        (folder / f"{number:03d}.txt").write_text(f"{number} " + " ".join(words) + "\n")
    return folder


def recipe(folder: Path, name: str = "small", **changes: Any) -> dict[str, Any]:
    """A recipe as a mapping. `changes` replace fields of the stage."""
    text = folder / "text"
    if not text.exists():
        write_text(text)
    corpus = {"source": "text", "path": str(text), "holdout": 0.2}
    stage = {
        "name": "base",
        "data": "train",
        "context": 32,
        "tokens": 20 * 12 * 32,
        "batch_tokens": 12 * 32,
        "optim": {"lr": 3e-3, "schedule": {"kind": "wsd", "warmup": 2, "decay": 0.5}},
        "evaluate": {"data": "heldout", "every": 7},
        "gate": {"kind": "heldout", "max_loss": 6.0},
    }
    return {
        "run": {"name": name, "dir": str(folder / "runs"), "seed": 3},
        "tokenizer": {"kind": "bytes"},
        "model": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        "data": {"train": corpus | {"split": "train"}, "heldout": corpus | {"split": "heldout"}},
        "stages": [stage | changes],
        "machine": {
            "microbatch_rows": 1,
            "threads": 1,
            "device": "cpu",
            "precision": "float32",
            "data_workers": 1,
            "cache": str(folder / "cache"),
        },
        "checkpoint": {"every": 5, "every_time": "1h"},
        "ledger": {"peak_flops": 1e11},
    }


def with_machine(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return body | {"machine": body["machine"] | changes}
