"""The gradient of one global batch, complete and ready for the optimizer, by native or by exact sums."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from truestep.numerics.batch import Batch
from truestep.numerics.repeatable import repeatable
from truestep.parallel.exact import Exact
from truestep.parallel.model import LossOf
from truestep.runlog.counters import SectionOf
from truestep.train.routing import begin_routing, has_routers
from truestep.train.state import TrainState

Run = Callable[[], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Forward and backward of this rank's microbatches: loss sums (M,) and each metric's (M,), float64 on the device."""


@dataclass(frozen=True)
class Gradient:
    """`grads`: what the optimizer takes; `norm`: of the whole gradient, scalar float64. `sums`: loss sums of this
    rank's microbatches; `total`: of all ranks; `metrics`: sums over all ranks, by name; `agreed`: those of the
    questions. `troubles`: what went wrong with computations of the step, in order, as in parallel.exact.Outcome; all
    but a last one at which it gave up were made good by computing again."""

    grads: list[torch.Tensor]
    norm: torch.Tensor
    sums: list[float]
    total: float
    metrics: dict[str, float]
    agreed: list[float]
    troubles: list[str] = field(default_factory=list)


def gradient(
    state: TrainState,
    batches: list[Batch],
    loss_of: LossOf,
    factor: float,
    begin: Callable[[int], None],
    questions: Iterable[float],
) -> Gradient:
    """Forward and backward of this rank's microbatches, then all sums over ranks. Collective. `questions` are numbers
    to be summed over ranks along with the rest, asked for after the last backward pass."""
    run = partial(_run, state, batches, loss_of, factor, begin)
    return fast(state, run, questions) if state.exact is None else exact(state, state.exact, run, questions)


def fast(state: TrainState, run: Run, questions: Iterable[float]) -> Gradient:
    """Native reductions, at least in fp32."""
    compared = state.guard is not None and state.guard.armed
    with repeatable(state.parallel.device) if compared else nullcontext():
        sums, metrics = run()
    state.parallel.complete_gradients()
    grads = _handed_over(state)
    norm = state.parallel.grad_norm()
    losses = sums.tolist()
    here = [float(values.sum()) for values in metrics.values()]
    total, *rest = state.job.all_sum([sum(losses), *here, *questions])
    return Gradient(grads, norm, losses, total, dict(zip(metrics, rest)), rest[len(metrics) :])


def exact(state: TrainState, reduction: Exact, run: Run, questions: Iterable[float]) -> Gradient:
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
    total, *named = outcome.sums
    return Gradient(grads, norm, losses, total, dict(zip(metrics, named)), state.job.all_sum([*questions]), troubles)


def _run(
    state: TrainState, batches: list[Batch], loss_of: LossOf, factor: float, begin: Callable[[int], None]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    state.counters.enter(SectionOf.COMPUTE)
    if has_routers(state):
        begin_routing(state, batches, state.scaler.scale)
    sums, metrics = state.parallel.run(batches, loss_of, factor, begin)
    state.counters.enter(SectionOf.REDUCE)
    return torch.stack(sums).double(), {name: torch.stack(values).double() for name, values in metrics.items()}


def _handed_over(state: TrainState) -> list[torch.Tensor]:
    grads = state.parallel.hand_over_gradients()
    state.scaler.unscale_(grads)
    if state.guard is not None:
        state.guard.reduced()
    if state.digests is not None:
        state.digests.reduced(state.step + 1)
    return grads
