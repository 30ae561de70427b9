"""One training step: data, forward, loss, backward, verdict, clip, update.

The loss of every microbatch is a sum divided by the weight of the whole global batch, so gradients add up over
microbatches and ranks without any further factor, and no mean of means exists anywhere.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

import torch

from truestep.errors import UserError
from truestep.losses.base import Loss, LossSum
from truestep.numerics.batch import Batch
from truestep.numerics.head import HeadInput, Logits, OwnLoss
from truestep.optim.clip import clip_
from truestep.optim.schedule import factor
from truestep.runlog.counters import SectionOf
from truestep.sentinel.finite import NO_TARGETS, Judgement, Verdict
from truestep.train.gradients import gradient
from truestep.train.guard import Work, everything
from truestep.train.routing import end_routing, has_routers
from truestep.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What one step did, with numbers of the global batch: `loss` per unit of its weight, which is nats per target but
    for a loss of the user's own, and `grad_norm` before clipping.

    `shards` holds this rank's microbatches as (loss sum, weight, norm of its contribution, NaN where it is not known).
    `agreed` are the sums over ranks of the numbers that the loop passed in. `troubles`: see train.gradients.Gradient.
    """

    loss: float
    grad_norm: float
    clip: float
    targets: int
    judgement: Judgement
    shards: list[tuple[float, float, float]]
    metrics: dict[str, float] = field(default_factory=dict)
    agreed: list[float] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict


def head_loss(
    loss: Loss, batch: Batch, out: HeadInput | Logits | OwnLoss
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What the model's head computes in training. A plain tuple, since FSDP2 finds its tensors in outputs that way."""
    result = loss(out, batch)
    if not isinstance(result, LossSum):
        name, kind = type(loss).__name__, type(result).__name__
        raise UserError(f"loss {name} returned a {kind}; return truestep.losses.base.LossSum(sum over the targets)")
    return result.sum, result.metrics


def train_step(state: TrainState, batches: list[Batch], num_targets: int, questions: list[float]) -> StepResult:
    """Train on this rank's microbatches of one global batch that has `num_targets` targets in all.

    `questions` are numbers of the loop (stop asked? save due?) that ride along in the step's one agreement.
    """
    parallel, job = state.parallel, state.job
    for prepare in state.before_step:
        prepare()
    scale, groups = state.scaler.scale, parallel.groups
    batches = [parallel.own_part(batch) for batch in batches]
    weights = [float(state.loss.weight(batch)) if parallel.counts else 0.0 for batch in batches]
    divisor = job.all_sum([sum(weights)])[0] if state.own_weight else num_targets

    def begin_number(number: int) -> None:
        seed_(stream(state.seed, state.step, number), parallel.device)
        if parallel.draws is not None:
            parallel.draws.begin(state.step, number)

    def begin(index: int) -> None:
        state.counters.microbatch(index)
        begin_number(state.number(index, groups.data_rank))

    def loss_of(batch: Batch) -> Any:
        for add in state.before:
            batch = add(batch)
        return partial(head_loss, state.loss, batch)

    share = scale / divisor if divisor else 0.0
    if state.guard is not None:
        state.guard.begin(Work(batches, loss_of, share, begin_number))
    found = gradient(state, batches, weights, loss_of, share, begin, everything(questions, state.guard))
    agreed, numbers = found.agreed[: len(questions)], found.agreed[len(questions) :]
    loss, norm = found.total / divisor if divisor else 0.0, found.norm.item()
    if state.guard is not None:
        state.guard.inspect(found.shards, numbers, finite=isfinite(loss) and isfinite(norm))
    judgement = state.spikes.judge(loss, norm, scaled=scale > 1.0) if divisor else NO_TARGETS
    taken = judgement.verdict is Verdict.GO

    clip = 1.0
    if taken:
        state.counters.enter(SectionOf.UPDATE)
        clip = clip_(found.grads, found.norm, state.section.clip_norm).item()
        if state.before_update is not None:
            state.before_update()
        state.optimizer.set_lr_factor(factor(state.section.schedule, state.updates, state.steps))
        state.optimizer.step()
        parallel.updated()
        if state.average is not None:
            state.average.update()
        state.updates += 1
    if divisor:
        state.scaler.update(finite=judgement.fault == "spike" or taken)
    state.spikes.note(state.step, loss, norm, judgement)
    parallel.zero_grad()
    state.step += 1
    metrics = {name: value / (divisor or 1) for name, value in found.metrics.items()}
    metrics |= {f"redone: {trouble}": float(count) for trouble, count in Counter(found.troubles).items()}
    if has_routers(state):
        metrics |= end_routing(state, update=taken)
    return StepResult(loss, norm, clip, num_targets, judgement, found.shards, metrics, agreed, found.troubles)


def seed_(seed: int, device: torch.device) -> None:
    """Set torch's generators of the CPU and of the device. `torch.manual_seed` also formats the stack for every
    kind of device that is not in use: about 70 µs a microbatch instead of 1."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def stream(seed: int, step: int, microbatch: int) -> int:
    """Seed of torch's generator for one microbatch of a step (dropout and the like of a user's own module).

    Derived, not carried: nothing to save, and the same whichever rank the microbatch goes to.
    """
    mixed = seed
    for part in (step, microbatch):
        mixed = (mixed * 6364136223846793005 + part * 2 + 1442695040888963407) & (2**63 - 1)
    return mixed
