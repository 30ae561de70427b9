"""What `numerics.reduction = "exact"` costs: its step beside that of "fast", on forked CPU ranks.

    python benchmarks/exact.py            30M parameters, 4 ranks, FSDP2 and replicas, about 10 minutes on 2 cores
    python benchmarks/exact.py --smoke    a tiny shape, under a minute: tries the harness, measures nothing

Both contenders live in the same ranks, see the same rows and take turns. Seconds of a step are those of the slowest
rank, CPU seconds those of all ranks together. The losses of a round must agree.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import Clock, by_turns, machine, median, model_section, ratio, save, show

# isort: split
import torch
import torch.distributed as dist
from tests.dist import run_ranks

from truestep.losses.base import LossSum
from truestep.models.build import build_model, init_weights
from truestep.numerics.batch import Batch
from truestep.numerics.uses import as_use
from truestep.optim.clip import clip_
from truestep.optim.schedule import factor
from truestep.parallel.exact import Exact
from truestep.parallel.exact_model import reduce_exactly
from truestep.parallel.job import Job
from truestep.recipe.machine import Machine, Mesh
from truestep.recipe.stage import Stage
from truestep.train.build import build
from truestep.train.state import TrainState
from truestep.train.step import train_step

MESHES = {"dp_shard": Mesh(dp_replicate=1, dp_shard="auto"), "dp_replicate": Mesh(dp_replicate="auto", dp_shard=1)}


def made(shape: str, mesh: Mesh, rows: int, context: int, job: Job) -> TrainState:
    section = model_section(shape)
    tokens = rows * context * job.world
    stage = Stage(name="bench", data="made-up", context=context, tokens=1000 * tokens, batch_tokens=tokens)
    model = build_model(section, section.vocab_size)
    fill = lambda part, pieces: init_weights(part, 0, pieces)  # noqa: E731
    machine = Machine(mesh=mesh, microbatch_rows=rows)
    return build(stage, model, fill, job=job, machine=machine, precision="float32", seed=0, steps=1000)


def made_exact(shape: str, mesh: Mesh, rows: int, context: int, job: Job) -> tuple[TrainState, Exact]:
    state = made(shape, mesh, rows, context, job)
    parallel = state.parallel
    if parallel.call is not parallel.bare:  # DDP sums in floating point
        parallel.call, world = parallel.bare, parallel.groups.world
        parallel.places = {name: replace(place, missing=world) for name, place in parallel.places.items()}
    exact = reduce_exactly(parallel, list(parallel.named_parameters()), job.control, tied="embed.weight")
    return state, exact


def exact_step(state: TrainState, exact: Exact, batches: list[Batch], num_targets: int) -> float:
    """`train_step` by exact reduction, on one process or data axes; the loss."""
    parallel, sink = state.parallel, exact.sink("embed.weight")

    def loss_of(batch: Batch) -> Callable[[Any], tuple[torch.Tensor, dict]]:
        def head(out: Any) -> tuple[torch.Tensor, dict]:
            result: LossSum = state.loss(replace(out, weight_VD=as_use(out.weight_VD, sink)), batch)
            return result.sum, result.metrics

        return head

    redo = True
    while redo:
        with exact.step():
            sums, metrics = parallel.run(batches, loss_of, 1 / num_targets, lambda index: None)
        outcome = exact.finish([torch.stack(sums).tolist(), [value.item() for value in metrics.values()]])
        redo = outcome.redo
    parallel.probe.take()
    norm = torch.tensor(outcome.norm, dtype=torch.float64)
    clip_(parallel.hand_over_gradients(), norm, state.section.clip_norm)
    state.optimizer.set_lr_factor(factor(state.section.schedule, state.updates, state.steps))
    state.optimizer.step()
    state.updates += 1
    parallel.zero_grad()
    return outcome.sums[0] / num_targets


def timed(step: Callable[[], float]) -> dict[str, float]:
    """One step, agreed over the ranks."""
    dist.barrier()
    clock = Clock()
    loss = step()
    took = clock.read()
    slowest, cpu = torch.tensor([took["seconds"]]), torch.tensor([took["cpu_seconds"]])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return {"seconds": slowest.item(), "cpu_seconds": cpu.item(), "loss": loss}


def compare(rank: int, world: int, name: str, asked: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    control = dist.new_group(backend="gloo")
    job = Job(rank, world, rank, world, torch.device("cpu"), "bench", control)
    size = (asked.shape, MESHES[name], asked.rows, asked.context, job)
    fast, (state, exact) = made(*size), made_exact(*size)
    vocab_size = model_section(asked.shape).vocab_size
    random = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(asked.microbatches):
        x_BT = torch.randint(vocab_size, (asked.rows, asked.context + 1), generator=random)
        places_BT = torch.arange(asked.context).expand(asked.rows, -1)
        batches.append(Batch(x_BT[:, :-1].clone(), x_BT[:, 1:].clone(), places_BT, None))
    num_targets = world * sum(batch.num_targets for batch in batches)
    contenders = {
        "fast": lambda: train_step(fast, batches, num_targets, []).loss,
        "exact": lambda: exact_step(state, exact, batches, num_targets),
    }
    timers = {key: partial(timed, step) for key, step in contenders.items()}
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
