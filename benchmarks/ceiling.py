"""The share of this machine's fp32 matrix-product peak that a training step reaches, by CPU-seconds.

    python benchmarks/ceiling.py            30M parameters, 1 and 2 threads, about 2 minutes on 2 cores
    python benchmarks/ceiling.py --smoke    a tiny shape: tries the harness, measures nothing

FLOPs of a step are those of the recipe's counting rule (causal attention). Peak and step are measured in turns, both
per CPU-second, so that busy neighbours slow both alike: the share of a round is what they did in that round.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from harness import Clock, by_turns, machine, made_up_store, median, model_section, save, scratch, show

# isort: split
import torch

from truestep.data.loader import Corpus, Loader, microbatches
from truestep.models.build import build_model, init_weights
from truestep.numerics.batch import Batch
from truestep.parallel.job import Job
from truestep.recipe.machine import Machine
from truestep.recipe.model import COUNTING_RULE
from truestep.recipe.stage import Stage
from truestep.train.build import build
from truestep.train.state import TrainState
from truestep.train.step import train_step


def made(shape: str, context: int, rows: int, folder: Path) -> tuple[TrainState, list[Batch]]:
    """A state as a run has it, and one microbatch of made-up rows."""
    section = model_section(shape)
    tokens = rows * context
    store = made_up_store(folder / "store", section.vocab_size, 2 * tokens, context)
    stage = Stage(name="bench", data="made-up", context=context, tokens=1000 * tokens, batch_tokens=tokens)
    job = Job(0, 1, 0, 1, torch.device("cpu"), "none")
    state = build(
        stage,
        build_model(section, section.vocab_size),
        lambda model, pieces: init_weights(model, 0, pieces),
        job=job,
        machine=Machine(microbatch_rows=rows),
        precision="float32",
        seed=0,
        steps=1000,
    )
    return state, microbatches(Loader([Corpus(store)], context, seed=0), 0, rows, 0, 1, rows)


def product_rate(a: torch.Tensor, products: int) -> dict[str, float]:
    """FLOP per second of square matrix products, by wall time and by CPU time."""
    out = torch.empty_like(a)
    clock = Clock()
    for _ in range(products):
        torch.mm(a, a, out=out)
    return rates(2 * len(a) ** 3 * products, clock)


def step_rate(state: TrainState, batches: list[Batch], flops: float) -> dict[str, float]:
    num_targets = sum(batch.num_targets for batch in batches)
    clock = Clock()
    train_step(state, batches, num_targets, [])
    return rates(flops, clock)


def rates(flops: float, clock: Clock) -> dict[str, float]:
    took = clock.read()
    return {"flops_per_s": flops / took["seconds"], "flops_per_cpu_s": flops / took["cpu_seconds"]}


def with_threads(threads: int, measure: Any) -> Any:
    torch.set_num_threads(threads)
    return measure()


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--shape", default="30m-4k", choices=["30m-32k", "30m-4k", "tiny"])
    parse.add_argument("--context", type=int, default=256)
    parse.add_argument("--rows", type=int, default=4)
    parse.add_argument("--rounds", type=int, default=7)
    parse.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parse.add_argument("--size", type=int, default=1024, help="the peak's square matrices")
    parse.add_argument("--products", type=int, default=40, help="matrix products in a round")
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--out", type=Path)
    asked = parse.parse_args()
    if asked.smoke:
        asked.shape, asked.context, asked.rounds, asked.size, asked.products = "tiny", 32, 2, 128, 4
    facts = machine()
    section = model_section(asked.shape)
    flops = {causal: section.train_flops(asked.rows * asked.context, asked.context, causal) for causal in (True, False)}
    with scratch() as folder:
        state, batches = made(asked.shape, asked.context, asked.rows, Path(folder))
        a = torch.randn(asked.size, asked.size)
        contenders = {}
        for threads in asked.threads:
            contenders[f"peak {threads}"] = partial(with_threads, threads, partial(product_rate, a, asked.products))
            contenders[f"step {threads}"] = partial(
                with_threads, threads, partial(step_rate, state, batches, flops[True])
            )
        by_turns(contenders, 1)  # warm-up
        found = by_turns(contenders, asked.rounds)
    result: dict[str, Any] = {"threads": {}, "rule": COUNTING_RULE, "flops_full_to_causal": flops[False] / flops[True]}
    for threads in asked.threads:
        peak, step = found[f"peak {threads}"], found[f"step {threads}"]
        shares = [s["flops_per_cpu_s"] / p["flops_per_cpu_s"] for s, p in zip(step, peak)]
        result["threads"][str(threads)] = {
            "share_of_peak": median(shares),
            "shares": shares,
            "peak_flops_per_cpu_s": median([p["flops_per_cpu_s"] for p in peak]),
            "step_flops_per_cpu_s": median([s["flops_per_cpu_s"] for s in step]),
            "step_flops_per_s": median([s["flops_per_s"] for s in step]),
        }
    rows = []
    for threads, figures in result["threads"].items():
        speeds = [figures[name] / 1e9 for name in ("peak_flops_per_cpu_s", "step_flops_per_cpu_s", "step_flops_per_s")]
        rows.append([threads, *speeds, share(figures)])
    columns = ["threads", "peak GFLOP/CPU-s", "step GFLOP/CPU-s", "step GFLOP/s", "share of peak (least-largest)"]
    show(f"{asked.shape}, {asked.rows} rows of {asked.context}, fp32", columns, rows)
    settings = {name: value for name, value in vars(asked).items() if name != "out"}
    save("ceiling", result | {"settings": settings, "machine": facts}, asked.out)


def share(figures: dict[str, Any]) -> str:
    return f"{figures['share_of_peak']:.3f} ({min(figures['shares']):.3f}-{max(figures['shares']):.3f})"


if __name__ == "__main__":
    sys.exit(main())
