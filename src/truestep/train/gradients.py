"""The gradient of one global batch, complete and ready for the optimizer, by native or by exact sums."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from truestep.numerics.batch import Batch
from truestep.numerics.repeatable import repeatable
from truestep.parallel.exact import Exact
from truestep.parallel.model import LossOf
from truestep.runlog.counters import SectionOf
from truestep.sentinel.statistics import apart
from truestep.train.routing import begin_routing, has_routers
from truestep.train.state import TrainState

Run = Callable[[], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Forward and backward of this rank's microbatches: loss sums (M,) and each metric's (M,), float64 on the device."""


@dataclass(frozen=True)
class Gradient:
    """`grads`: what the optimizer takes; `norm`: of the whole gradient, scalar float64. `shards`: of this rank's
    microbatches the loss sums, weights and norms of what they contribute, NaN where that is not known. `total`: sum of
    all ranks' losses; `metrics`: sums over all ranks, by name; `agreed`: those of the questions. `troubles`: what went
    wrong with computations of the step, in order, as in parallel.exact.Outcome; all but a last one at which it gave up
    were made good by computing again."""

    grads: list[torch.Tensor]
    norm: torch.Tensor
    shards: list[tuple[float, float, float]]
    total: float
    metrics: dict[str, float]
    agreed: list[float]
    troubles: list[str] = field(default_factory=list)


def gradient(
    state: TrainState,
    batches: list[Batch],
    weights: list[float],
    loss_of: LossOf,
    factor: float,
    begin: Callable[[int], None],
    questions: Iterable[float],
) -> Gradient:
    """Forward and backward of this rank's microbatches, then all sums over ranks. Collective. `weights`: of the
    microbatches. `questions` are numbers to be summed over ranks along with the rest, asked for after the last backward
    pass."""
    run = partial(_run, state, batches, loss_of, factor, begin)
    if state.exact is None:
        return fast(state, run, weights, questions)
    return exact(state, state.exact, run, weights, questions)


def fast(state: TrainState, run: Run, weights: list[float], questions: Iterable[float]) -> Gradient:
    """Native reductions, at least in fp32."""
    compared = state.guard is not None and state.guard.armed
    with repeatable(state.parallel.device) if compared else nullcontext():
        sums, metrics = run()
    state.parallel.complete_gradients()
    grads = _handed_over(state)
    norm = state.parallel.grad_norm()
    losses = sums.tolist()
    shards = list(zip(losses, weights, _norms(state, len(losses))))
    here = [float(values.sum()) for values in metrics.values()]
    (total, *named), agreed = _agree(state, [sum(losses), *here], shards, questions)
    return Gradient(grads, norm, shards, total, dict(zip(metrics, named)), agreed)


def exact(state: TrainState, reduction: Exact, run: Run, weights: list[float], questions: Iterable[float]) -> Gradient:
    """Every microbatch's gradient, the same bits every time, rounded to integers before any sum; computed again where
    it does not fit."""
    parallel, troubles = state.parallel, []
    while True:
        with reduction.step(), repeatable(parallel.device):
            sums, metrics = run()
        losses = sums.tolist()
        outcome = reduction.finish([losses, *(values.tolist() for values in metrics.values())])
        troubles += [outcome.trouble] if outcome.trouble else []
        if not outcome.redo:
            break
        parallel.zero_grad()
        parallel.probe.take()
    grads = _handed_over(state)
    norm = torch.tensor(outcome.norm / state.scaler.scale, dtype=torch.float64, device=parallel.device)
    shards = list(zip(losses, weights, _norms(state, len(losses))))
    total, *named = outcome.sums
    _, agreed = _agree(state, [], shards, questions)
    return Gradient(grads, norm, shards, total, dict(zip(metrics, named)), agreed, troubles)


def _run(
    state: TrainState, batches: list[Batch], loss_of: LossOf, factor: float, begin: Callable[[int], None]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    state.counters.enter(SectionOf.COMPUTE)
    active = state.active(len(batches))
    if has_routers(state):
        begin_routing(state, batches[:active], state.scaler.scale)
    sums, metrics = state.parallel.run(batches[:active], loss_of, factor, begin)
    state.counters.enter(SectionOf.REDUCE)
    rest = len(batches) - active  # padding, which nobody has to compute: this replica has fewer than others
    state.parallel.probe.nothing(rest)
    return _filled(sums, rest), {name: _filled(values, rest) for name, values in metrics.items()}


def _filled(values: list[torch.Tensor], zeros: int) -> torch.Tensor:
    """As one float64 tensor, with zeros behind."""
    return torch.nn.functional.pad(torch.stack(values).double(), (0, zeros))


def _handed_over(state: TrainState) -> list[torch.Tensor]:
    grads = state.parallel.hand_over_gradients()
    state.scaler.unscale_(grads)
    if state.guard is not None:
        state.guard.reduced()
    if state.digests is not None:
        state.digests.reduced(state.step + 1)
    return grads


def _norms(state: TrainState, count: int) -> list[float]:
    """Of what each microbatch contributes; NaN where it is not known: a pipeline sums over its microbatches."""
    norms = [norm / state.scaler.scale for norm in state.parallel.probe.take()]
    return norms if len(norms) == count else [math.nan] * count


def _agree(
    state: TrainState, mine: list[float], shards: list[tuple[float, float, float]], questions: Iterable[float]
) -> tuple[list[float], list[float]]:
    """The sums over ranks of `mine` and of the questions. The numbers of shards travel along, each rank's at a place of
    its own, so that statistics look at all of them on every rank."""
    job, flat = state.job, [number for shard in shards for number in shard]
    places = [] if state.statistics is None else apart(flat, job.rank, job.world)
    found = job.all_sum([*mine, *places, *questions])
    first, last = len(mine), len(mine) + len(places)
    if state.statistics is not None:
        state.statistics.look(np.reshape(found[first:last], (job.world, len(shards), 3)))
    return found[:first], found[last:]
