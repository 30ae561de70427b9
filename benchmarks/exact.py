"""What `numerics.reduction = "exact"` costs: its step beside that of "fast", on forked CPU ranks.

    python benchmarks/exact.py            30M parameters, 4 ranks, FSDP2 and replicas, about 10 minutes on 2 cores
    python benchmarks/exact.py --smoke    a tiny shape, under a minute: tries the harness, measures nothing

Both contenders live in the same ranks, see the same rows and take turns. Seconds of a step are those of the slowest
rank, CPU seconds those of all ranks together. The losses of a round must agree.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from harness import Clock, by_turns, machine, median, model_section, ratio, save, show

# isort: split
import torch
import torch.distributed as dist
from tests.dist import run_ranks

from truestep.models.build import build_model, init_weights
from truestep.numerics.batch import Batch
from truestep.parallel.job import Job
from truestep.recipe.machine import Machine, Mesh
from truestep.recipe.numerics import Numerics
from truestep.recipe.stage import Stage
from truestep.train.build import build
from truestep.train.state import TrainState
from truestep.train.step import train_step

MESHES = {"dp_shard": Mesh(dp_replicate=1, dp_shard="auto"), "dp_replicate": Mesh(dp_replicate="auto", dp_shard=1)}


def made(shape: str, mesh: Mesh, rows: int, context: int, job: Job, reduction: str) -> TrainState:
    section = model_section(shape)
    tokens = rows * context * job.world
    return build(
        Stage(name="bench", data="made-up", context=context, tokens=1000 * tokens, batch_tokens=tokens),
        build_model(section, section.vocab_size),
        lambda part, pieces: init_weights(part, 0, pieces),
        job=job,
        machine=Machine(mesh=mesh, microbatch_rows=rows),
        precision="float32",
        seed=0,
        steps=1000,
        numerics=Numerics.model_validate({"reduction": reduction}),
    )


def timed(state: TrainState, batches: list[Batch], num_targets: int) -> dict[str, float]:
    """One step, agreed over the ranks."""
    dist.barrier()
    clock = Clock()
    loss = train_step(state, batches, num_targets, []).loss
    took = clock.read()
    slowest, cpu = torch.tensor([took["seconds"]]), torch.tensor([took["cpu_seconds"]])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return {"seconds": slowest.item(), "cpu_seconds": cpu.item(), "loss": loss}


def compare(rank: int, world: int, name: str, asked: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    control = dist.new_group(backend="gloo")
    job = Job(rank, world, rank, world, torch.device("cpu"), "bench", control)
    size = (asked.shape, MESHES[name], asked.rows, asked.context, job)
    states = {reduction: made(*size, reduction) for reduction in ("fast", "exact")}
    vocab_size = model_section(asked.shape).vocab_size
    random = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(asked.microbatches):
        x_BT = torch.randint(vocab_size, (asked.rows, asked.context + 1), generator=random)
        places_BT = torch.arange(asked.context).expand(asked.rows, -1)
        batches.append(Batch(x_BT[:, :-1].clone(), x_BT[:, 1:].clone(), places_BT, None))
    num_targets = world * sum(batch.num_targets for batch in batches)
    timers = {name: partial(timed, state, batches, num_targets) for name, state in states.items()}
    by_turns(timers, 1)  # warm-up; of exact reduction the first step is computed twice
    return by_turns(timers, asked.rounds)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--shape", default="30m-32k", choices=["30m-32k", "30m-4k", "tiny"])
    parse.add_argument("--ranks", type=int, default=4)
    parse.add_argument("--context", type=int, default=256)
    parse.add_argument("--rows", type=int, default=4)
    parse.add_argument("--microbatches", type=int, default=2, help="of each rank in a step")
    parse.add_argument("--rounds", type=int, default=5)
    parse.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--out", type=Path)
    asked = parse.parse_args()
    if asked.smoke:
        asked.shape, asked.context, asked.rows, asked.rounds = "tiny", 32, 1, 2
    facts = machine()
    result: dict[str, Any] = {"meshes": {}}
    rows = []
    for name in asked.meshes:
        found = run_ranks(compare, asked.ranks, name, asked, timeout_s=3600)[0]
        for fast, exact in zip(found["fast"], found["exact"], strict=True):
            if abs(fast["loss"] - exact["loss"]) > 1e-3:
                raise SystemExit(f"the losses of a round differ: {fast['loss']} and {exact['loss']}")
        figures: dict[str, Any] = {"steps": found}
        for key in ("seconds", "cpu_seconds"):
            columns = {who: [step[key] for step in steps] for who, steps in found.items()}
            figures[key] = {who: median(values) for who, values in columns.items()}
            figures[f"{key}_ratio"] = ratio(columns["exact"], columns["fast"])
            rows.append([name, key, *figures[key].values(), shown(figures[f"{key}_ratio"])])
        result["meshes"][name] = figures
    tokens = asked.ranks * asked.microbatches * asked.rows * asked.context
    title = f"{asked.shape}, {asked.ranks} ranks, {tokens} tokens a step, fp32"
    show(title, ["mesh", "of a step", "fast", "exact", "exact / fast (least-largest)"], rows)
    settings = {name: value for name, value in vars(asked).items() if name != "out"}
    save("exact", result | {"settings": settings, "machine": facts}, asked.out)


def shown(figures: dict[str, float]) -> str:
    return f"{figures['median']:.3f} ({figures['min']:.3f}-{figures['max']:.3f})"


if __name__ == "__main__":
    sys.exit(main())
