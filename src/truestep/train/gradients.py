"""The gradient of one global batch, complete and ready for the optimizer, by native or by exact sums."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from truestep.numerics.batch import Batch
from truestep.numerics.repeatable import repeatable
from truestep.parallel.model import LossOf
from truestep.train.routing import begin_routing, has_routers
from truestep.train.state import TrainState


@dataclass(frozen=True)
class Gradient:
    """`grads`: what the optimizer takes; `norm`: of the whole gradient, scalar float64. `sums`: loss sums of this
    rank's microbatches; `total`: of all ranks; `metrics`: sums over all ranks, by name; `agreed`: those of the
    questions."""

    grads: list[torch.Tensor]
    norm: torch.Tensor
    sums: list[float]
    total: float
    metrics: dict[str, float]
    agreed: list[float]


def gradient(
    state: TrainState,
    batches: list[Batch],
    loss_of: LossOf,
    factor: float,
    begin: Callable[[int], None],
    questions: list[float],
) -> Gradient:
    """Forward and backward of this rank's microbatches, then all sums over ranks. Collective. `questions` are numbers
    to be summed over ranks along with the rest."""
    how = fast if state.exact is None else exact
    return how(state, batches, loss_of, factor, begin, questions)


def fast(
    state: TrainState,
    batches: list[Batch],
    loss_of: LossOf,
    factor: float,
    begin: Callable[[int], None],
    questions: list[float],
) -> Gradient:
    """Native reductions, at least in fp32."""
    parallel = state.parallel
    if has_routers(state):
        begin_routing(state, batches, state.scaler.scale)
    sums, metrics = parallel.run(batches, loss_of, factor, begin)
    parallel.complete_gradients()
    grads = parallel.hand_over_gradients()
    state.scaler.unscale_(grads)
    norm = parallel.grad_norm()
    losses = torch.stack(sums).double().tolist()
    here = [float(torch.stack(values).sum()) for values in metrics.values()]
    total, *rest = state.job.all_sum([sum(losses), *here, *questions])
    return Gradient(grads, norm, losses, total, dict(zip(metrics, rest)), rest[len(metrics) :])


def exact(
    state: TrainState,
    batches: list[Batch],
    loss_of: LossOf,
    factor: float,
    begin: Callable[[int], None],
    questions: list[float],
) -> Gradient:
    """Every microbatch's gradient, the same bits every time, rounded to integers before any sum; computed again where
    it does not fit."""
    parallel, reduction = state.parallel, state.exact
    assert reduction is not None
    while True:
        if has_routers(state):
            begin_routing(state, batches, state.scaler.scale)
        with reduction.step(), repeatable(parallel.device):
            sums, metrics = parallel.run(batches, loss_of, factor, begin)
        losses = torch.stack(sums).double().tolist()
        outcome = reduction.finish([losses, *(torch.stack(values).double().tolist() for values in metrics.values())])
        if not outcome.redo:
            break
        parallel.zero_grad()
        parallel.probe.take()
    grads = parallel.hand_over_gradients()
    state.scaler.unscale_(grads)
    norm = torch.tensor(outcome.norm / state.scaler.scale, dtype=torch.float64, device=parallel.device)
    total, *named = outcome.sums
    return Gradient(grads, norm, losses, total, dict(zip(metrics, named)), state.job.all_sum(questions))
