"""Training in number formats of 8 and 4 bits beside bfloat16 and float32: whole runs of a small model, 300 steps each.

    python benchmarks/low_precision.py                      every contender, about 12 minutes on a quiet core
    python benchmarks/low_precision.py --kinds bfloat16 mxfp8 --seeds 1 2
    python benchmarks/low_precision.py --smoke              two contenders, a few steps: tries the harness

Every contender is the same recipe: same weights at the start, same rows, same schedule; low formats lie within bfloat16
(autocast), emulated on a CPU. Losses are the figures here. Seconds are those of emulation, and of whatever else the
machine does; a device with units for a format says something about its speed, this does not.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from harness import machine, save, scratch, show

# isort: split
from tests.small_run import write_text

from truestep.cli import verbs
from truestep.runlog.log import read

KINDS = ["float32", "bfloat16", "fp8-tensorwise", "fp8-rowwise", "mxfp8", "nvfp4"]
REFERENCE = "bfloat16"
CONTEXT, BATCH_ROWS, LAST = 128, 8, 50
TOKENIZER = {"kind": "train-bpe", "vocab_size": 1024}
CORPUS = {"source": "python-stdlib", "holdout": 0.01}
MODEL = {
    "family": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_layers": 4,
    "num_heads": 4,
    "tie_embeddings": True,
}
OPTIM = {"kind": "muon", "lr": 4e-3, "muon_lr": 0.02, "weight_decay": 0.05}
"""As in the quickstart. AdamW on a Llama of this size at lr 3e-3 is chaotic: after 60 steps seeds lie 0.3 nats apart,
and any rounding moves a run as far in either direction, which hides what the formats do. Here seeds lie 0.03 apart."""


def recipe(folder: Path, kind: str, seed: int, steps: int, smoke: bool) -> dict[str, Any]:
    """The run of one contender, below `folder`."""
    corpus = {"source": "text", "path": str(folder / "text"), "holdout": 0.2} if smoke else CORPUS
    stage = {
        "name": "base",
        "data": "train",
        "context": CONTEXT,
        "tokens": steps * BATCH_ROWS * CONTEXT,
        "batch_tokens": BATCH_ROWS * CONTEXT,
        "optim": OPTIM | {"schedule": {"kind": "wsd", "warmup": steps // 15, "decay": 0.4}},
        "evaluate": {"data": "heldout"},
        "gate": {"kind": "none", "reason": "a benchmark"},
    }
    body = {
        "run": {"name": f"{kind}-{seed}", "dir": str(folder / "runs"), "seed": seed},
        "tokenizer": {"kind": "bytes"} if smoke else TOKENIZER,
        "model": MODEL,
        "data": {"train": corpus | {"split": "train"}, "heldout": corpus | {"split": "heldout"}},
        "stages": [stage],
        "machine": {
            "microbatch_rows": BATCH_ROWS,
            "threads": 1,
            "device": "cpu",
            "precision": kind if kind in ("float32", "bfloat16") else REFERENCE,
            "cache": str(folder / "cache"),
        },
        "checkpoint": {"every": steps},
    }
    return body if kind in ("float32", "bfloat16") else body | {"numerics": {"low_precision": {"kind": kind}}}


def compute(body: dict[str, Any]) -> dict[str, Any]:
    """Carry out a run; its figures as its log has them."""
    began = time.process_time()
    records = list(read(verbs.run(body).directory))
    steps = [record.data for record in records if record.kind == "step"]
    (held_out,) = (record.data for record in records if record.kind == "eval")
    (memory,) = (record.data for record in records if record.kind == "memory")
    return {
        "training_loss": statistics.fmean(step.loss for step in steps[-LAST:]),
        "held_out_loss": held_out.loss,
        "same_weights_high": held_out.high_loss,
        "kept_bytes": memory.kept_bytes,
        "seconds": sum(step.step_s for step in steps),
        "cpu_seconds": time.process_time() - began,
        "losses": [step.loss for step in steps],
    }


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Means over seeds by contender. `gaps`: held-out loss beyond the reference's, seed by seed."""
    reference = [run["held_out_loss"] for run in found.get(REFERENCE, [])]
    return {kind: _means(runs) | {"gaps": _gaps(runs, reference), "runs": runs} for kind, runs in found.items()}


def _means(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = ["training_loss", "held_out_loss", "kept_bytes", "seconds", "cpu_seconds"]
    costs = [r["held_out_loss"] - r["same_weights_high"] for r in runs if r["same_weights_high"] is not None]
    means = {name: statistics.fmean(run[name] for run in runs) for name in names}
    return means | {"format_costs": statistics.fmean(costs) if costs else None}


def _gaps(runs: list[dict[str, Any]], reference: list[float]) -> list[float]:
    return [run["held_out_loss"] - other for run, other in zip(runs, reference)]


def report(result: dict[str, Any]) -> None:
    rows = []
    for kind, figures in result["contenders"].items():
        gap = f"{statistics.fmean(figures['gaps']):+.4f}" if figures["gaps"] else ""
        costs = "" if figures["format_costs"] is None else f"{figures['format_costs']:+.4f}"
        losses = (f"{figures[name]:.4f}" for name in ("training_loss", "held_out_loss"))
        kept = figures["kept_bytes"] / 2**20
        rows.append([kind, *losses, gap, costs, f"{kept:.2f}", figures["seconds"], figures["cpu_seconds"]])
    settings = result["settings"]
    title = f"{settings['steps']} steps of {BATCH_ROWS * CONTEXT} tokens, seeds {settings['seeds']}"
    columns = [
        "products",
        f"training loss, last {LAST}",
        "held-out loss",
        f"beyond {REFERENCE}",
        "beyond high, same weights",
        "kept MiB a microbatch",
        "seconds of steps",
        "CPU seconds of the run",
    ]
    show(title, columns, rows, ["losses in nats per token", f"load average before: {result['machine']['load_before']}"])


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--steps", type=int, default=300)
    parse.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parse.add_argument("--seeds", nargs="+", type=int, default=[1])
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--out", type=Path, help="the JSON file; by default benchmarks/out/low-precision.json")
    asked = parse.parse_args()
    if asked.smoke:
        asked.steps, asked.kinds = 4, [REFERENCE, "fp8-rowwise"]
    facts = machine()
    with scratch() as name:
        folder = Path(name)
        if asked.smoke:
            write_text(folder / "text")
        found = {
            kind: [compute(recipe(folder, kind, seed, asked.steps, asked.smoke)) for seed in asked.seeds]
            for kind in asked.kinds
        }
    settings = {"steps": asked.steps, "kinds": asked.kinds, "seeds": asked.seeds, "model": MODEL, "optim": OPTIM}
    result = {"contenders": summary(found), "settings": settings, "machine": facts}
    report(result)
    save("low-precision", result, asked.out)


if __name__ == "__main__":
    main()
