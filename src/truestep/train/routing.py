"""What a step does for routers of experts: the size of the global batch goes in, what they counted comes out."""

from collections.abc import Sequence
from typing import Any

import torch

from truestep.models.decoder import Decoder
from truestep.numerics.batch import Batch
from truestep.train.state import TrainState


def has_routers(state: TrainState) -> bool:
    """Whether the model routes tokens to experts; the same on all ranks of a job."""
    return any(isinstance(part, Decoder) and part.section.moe is not None for part in state.parallel.parts)


def begin_routing(state: TrainState, batches: Sequence[Batch], scale: float) -> None:
    """Before the forward passes of a step on this rank's microbatches. Collective."""
    parts, groups = _parts(state), state.parallel.groups
    counted_here = groups.axes.tp.rank == groups.axes.cp.rank == groups.pp.rank == 0
    real = sum(_real_places(batch) for batch in batches) if counted_here else 0
    tokens = int(state.job.all_sum([float(real)])[0])
    for part in parts:
        part.begin_step(tokens, scale)
    if parts[0].wants_pre_pass:
        for batch in batches:
            state.parallel.evaluate(batch, _nothing)
        for part in parts:
            part.end_pre_pass(groups.stage.sum_)


def end_routing(state: TrainState, update: bool) -> dict[str, float]:
    """After the step. Collective. Metrics of all layers, the same on every rank."""
    groups = state.parallel.groups
    metrics: dict[str, float] = {}
    for part in _parts(state):
        for name, value in part.end_step(groups.stage.sum_, update).items():
            metrics[name] = metrics.get(name, 0.0) + value
    if state.job.control is None:
        return metrics
    if state.router_metrics is None:  # the same in every step
        state.router_metrics = sorted({name for names in state.job.everybody(list(metrics)) for name in names})
    mine = [metrics.get(name, 0.0) if groups.stage.rank == 0 else 0.0 for name in state.router_metrics]
    return dict(zip(state.router_metrics, state.job.all_sum(mine)))


def _parts(state: TrainState) -> list[Decoder]:
    return [part for part in state.parallel.parts if isinstance(part, Decoder)]


def _real_places(batch: Batch) -> int:
    """Places of a microbatch's whole rows that are no padding (a part of a row keeps the documents of all of it)."""
    return batch.tokens_BT.numel() if batch.documents_BT is None else int((batch.documents_BT >= 0).sum())


def _nothing(out: Any) -> torch.Tensor:
    return torch.zeros(())
