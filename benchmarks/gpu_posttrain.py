"""Post-training on one GPU at Qwen3-0.6B's shape, random weights: tokens per second of supervised fine-tuning at 8,192
tokens a row, and peak memory of DPO on pairs that fill such a row, against the step of fine-tuning.

    python benchmarks/gpu_posttrain.py          under 5 minutes; prints JSON
    python benchmarks/gpu_posttrain.py --dry    the same code at a size for CPUs, in seconds; measures nothing

Needs this repository, torch >= 2.11 and pydantic. bf16, blocks compiled. For comparison: prime-rl publishes 26,005
tokens/s for this model's fine-tuning at 8k on one H100 (of January 2026, another card and another loop than here). The
reference of DPO is a column, as the stage stores it before its first step: what its values are changes no memory.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_train import SHAPES, elapsed_s, fresh, log, made_up_rows

# isort: split
import torch

from truestep.models.build import build_model, init_weights
from truestep.numerics.batch import IGNORE, Batch
from truestep.parallel.job import Job
from truestep.recipe.machine import Machine
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage
from truestep.train.build import build
from truestep.train.state import TrainState
from truestep.train.step import train_step

QWEN3: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_layers": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tie_embeddings": True,
}
PUBLISHED = {"what": "prime-rl, SFT of Qwen3-0.6B, 8k, one H100", "tokens_per_s": 26_005}


def make_state(shape: dict[str, Any], kind: str, asked: argparse.Namespace, device: torch.device) -> TrainState:
    section = ModelSection(**shape, max_context=asked.context).resolved(shape["vocab_size"])
    stage = Stage(name="bench", kind=kind, data="x", context=asked.context, tokens=10**9, batch_tokens=asked.context)
    return build(
        stage,
        build_model(section, section.vocab_size),
        lambda model, pieces: init_weights(model, 0, pieces),
        job=Job(0, 1, 0, 1, device, "none"),
        machine=Machine(
            microbatch_rows=1, compile=not asked.dry, activation_checkpointing=asked.activation_checkpointing
        ),
        precision="float32" if asked.dry else "bfloat16",
        seed=0,
        steps=10_000,
    )


def answers(batch: Batch) -> Batch:
    """Every second half of a document is what the assistant made."""
    length = int(batch.positions_BT.max()) + 1
    return replace(batch, labels_BT=batch.labels_BT.where(batch.positions_BT >= length // 2, IGNORE))


def pair(batch: Batch) -> Batch:
    """The two documents of a row as one unit, with the reference's log-probabilities."""
    batch = answers(batch)
    first = (batch.documents_BT == 0) & (batch.positions_BT == 0)
    columns = {
        "unit": torch.zeros_like(batch.documents_BT),
        "side": torch.where(batch.documents_BT == 0, 1, -1).to(torch.int8),
        "counted": first.float(),
        "value": torch.zeros_like(first, dtype=torch.float32),
        "reference": torch.zeros_like(first, dtype=torch.float32),
    }
    return replace(batch, columns=columns)


def measure(state: TrainState, batch: Batch, steps: int) -> dict[str, Any]:
    """Seconds of a step (median, after three to settle) and the most memory that was taken."""

    cuda, took = state.parallel.device.type == "cuda", []
    for step in range(3 + steps):
        if cuda and step == 3:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        train_step(state, [batch], batch.num_targets, [])
        if cuda:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    step_s = sorted(took[3:])[steps // 2]
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return {"step_s": step_s, "tokens_per_s": batch.tokens_BT.numel() / step_s, "peak_memory_gib": peak}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--context", type=int, default=8192)
    parse.add_argument("--steps", type=int, default=10)
    parse.add_argument("--activation-checkpointing", default="none", choices=["none", "selective", "full"])
    parse.add_argument("--seconds", type=float, default=220, help="no further try is begun after this time")
    parse.add_argument("--dry", action="store_true")
    parse.add_argument("--out", type=Path, help="also write the JSON here")
    asked = parse.parse_args()
    shape = QWEN3
    if asked.dry:
        shape, asked.context, asked.steps = SHAPES["dry"], 64, 2
    elif not torch.cuda.is_available():
        raise SystemExit("no GPU here; --dry runs the same code on the CPU")
    device = torch.device("cpu" if asked.dry else "cuda:0")

    tries: dict[str, tuple[str, int, Callable[[Batch], Batch]]] = {
        "sft": ("sft", 1, answers),
        "sft, 8 samples a row": ("sft", 8, answers),
        "dpo": ("preference", 2, pair),
    }
    found: dict[str, Any] = {}
    for name, (kind, documents, made) in tries.items():
        if elapsed_s() > asked.seconds:
            log(f"no time left for: {name}")
            continue
        rows = made_up_rows(shape["vocab_size"], asked.context, 1, documents, pin=device.type == "cuda")
        state = make_state(shape, kind, asked, device)
        try:
            found[name] = measure(state, made(rows), asked.steps)
            log(f"{name}: {found[name]}")
        except torch.OutOfMemoryError:
            found[name] = None
            log(f"{name}: out of memory; try --activation-checkpointing full")
        del state
        fresh()
    result = {
        "device": "CPU" if asked.dry else torch.cuda.get_device_name(device),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
        "context": asked.context,
        "activation_checkpointing": asked.activation_checkpointing,
        "published": PUBLISHED,
        "tries": found,
        "seconds": elapsed_s(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
