"""The harness for losses that look at more than labels: the real step on ranks, beside the formula in one process.

The formula sees each sample alone; the ranks see rows, packed and padded by some layout and dealt out on some mesh.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.nn.functional import log_softmax

from tests.parallel import oracle
from tests.parallel.compositions import Composition
from tests.parallel.harness import PATIENCE_S, Whole, captured, errors, share, start, worst
from tests.parallel.harness import Found as Plain
from tests.parallel.objectives import OBJECTIVES, POINT, TEMPERATURE, Objective, Seen
from tests.parallel.units import Layout, Sample, Unit, draw_units, rows_of, with_reference, with_teacher
from tests.pool import Pool
from truestep.losses.distill import HIDDEN, Distillation
from truestep.losses.preference import PreferenceLoss
from truestep.models.decoder import Decoder
from truestep.numerics.batch import Batch
from truestep.numerics.head import HeadInput, Scores
from truestep.numerics.pieces import Piece
from truestep.parallel.mesh import Limits
from truestep.recipe.model import ModelSection
from truestep.train.frozen import HiddenStates, freeze
from truestep.train.state import TrainState
from truestep.train.step import train_step

BOUND = 1e-9
"""Largest difference of a gradient relative to the largest element of the tensor, of the loss and the norm relative to
themselves, all in float64, columns too."""
UNITS = 8


@dataclass
class Found:
    """What rank 0 brings home of one step."""

    loss: float
    norm: float
    metrics: dict[str, float]
    gradients: Whole = field(default_factory=dict)


def section_of(one: Composition, objective: Objective) -> ModelSection:
    return one.section().model_copy(update=objective.model)


def units_of(one: Composition, objective: Objective, count: int = UNITS) -> list[Unit]:
    """Units of the objective, with what another model (the reference) and a third one (the teacher) say of them."""
    units = draw_units(objective.units, count, one.vocab, one.seed)
    units = with_reference(units, partial(label_logp, plain_model(replace(one, seed=one.seed + 100))))
    if objective.top_k:
        units = with_teacher(units, partial(logits, teacher_of(one)), objective.top_k, TEMPERATURE)
    return units


def teacher_of(one: Composition) -> Decoder:
    return plain_model(_teaching(one))


def _teaching(one: Composition) -> Composition:
    return replace(one, seed=one.seed + 200)


def plain_model(one: Composition) -> Decoder:
    return oracle.whole_model(one).requires_grad_(False)


def logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Of a sample alone (T, V), or its scores (T,)."""
    place = torch.arange(len(ids))[None]
    return model(ids[None], place, torch.zeros_like(place, dtype=torch.int32), head=_finished)[0]


def _finished(out: HeadInput | Scores) -> torch.Tensor:
    return out.scores_BT if isinstance(out, Scores) else out.logits()


def label_logp(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    return log_softmax(logits(model, ids)[:-1], -1).gather(1, ids[1:, None])[:, 0]


def formula(one: Composition, objective: Objective, units: Sequence[Unit]) -> Found:
    """Loss and gradients by plain autograd."""
    model = oracle.whole_model(one, section=section_of(one, objective))
    teacher = teacher_of(one)
    loss = objective.formula([[_seen(model, teacher, objective, sample) for sample in unit] for unit in units])
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    gradients = {name: torch.zeros_like(named[name]) if g is None else g for name, g in zip(named, grads)}
    norm = torch.cat([grad.flatten() for grad in gradients.values()]).norm().item()
    return Found(loss.item(), norm, {}, gradients)


def _seen(model: Decoder, teacher: Decoder, objective: Objective, sample: Sample) -> Seen:
    at = sample.targets[1:]
    out = logits(model, sample.ids)
    nothing, scores_T = torch.zeros(0), None
    logp_N = logits_NV = teacher_NV = nothing
    if out.ndim == 1:
        scores_T = out
    else:
        logits_NV, teacher_NV = out[:-1][at], logits(teacher, sample.ids)[:-1][at]
        logp_N = log_softmax(logits_NV, -1).gather(1, sample.ids[1:][at][:, None])[:, 0]
    reference_N, value_T = sample.reference[1:][at].double(), sample.value.double()
    return Seen(logp_N, reference_N, logits_NV, teacher_NV, sample.side, value_T, scores_T)


def learn(pool: Pool, one: Composition, name: str, batch: Batch, reduction: str = "fast") -> Found:
    """One step on the rows of `batch`, on the mesh of `one`."""
    return pool.run(ranks_learn, one.world, one, name, batch, reduction, timeout_s=PATIENCE_S)[0]


def ranks_learn(rank: int, world: int, one: Composition, name: str, batch: Batch, reduction: str) -> Found:
    objective = OBJECTIVES[name]
    state = start(rank, world, one, stage=objective.stage, model=objective.model, reduction=reduction)
    if isinstance(state.loss, PreferenceLoss):
        state.loss.point = POINT
    if objective.online:
        teach(state, one)
    plain = Plain()
    with captured(state, plain):
        result = train_step(state, share(one, batch, rank), batch.num_targets, [])
    return Found(result.loss, result.grad_norm, result.metrics, plain.gradients)


def teach(state: TrainState, one: Composition) -> None:
    """Let the teacher answer in every step, on the mesh of the student."""
    assert isinstance(state.loss, Distillation)
    machine, values = one.machine(), oracle.whole_weights(_teaching(one))

    def own_values(_: nn.Module, pieces: Mapping[str, Piece]) -> None:
        for name, piece in pieces.items():
            piece.local.copy_(values[name][piece.region])

    with torch.device("meta"):
        teacher = Decoder(one.section())
    limits = Limits(False, one.heads, one.layers, 0, (one.context,), machine)
    settings = {"machine": machine, "precision": one.precision, "context": one.context, "limits": limits}
    state.before.append(HiddenStates(freeze(teacher, own_values, state.parallel, **settings), HIDDEN, state.loss))


def rows(one: Composition, name: str, layout: Layout) -> Batch:
    """The units of a composition as rows."""
    objective = OBJECTIVES[name]
    dtype = torch.float64 if one.precision == "float64" else torch.float32
    return rows_of(units_of(one, objective), replace(layout, context=one.context), objective.columns, dtype)


def faults(found: Found, wanted: Found, bound: float = BOUND) -> list[str]:
    """What is off by more than `bound`, with by how much."""
    figures = {"loss": (found.loss, wanted.loss), "norm": (found.norm, wanted.norm)}
    off = {name: oracle.relative(torch.tensor(a), torch.tensor(b).double()) for name, (a, b) in figures.items()}
    off |= errors(found.gradients, wanted.gradients)
    error, where = worst(off)
    return [] if error <= bound else [f"{where} is off by {error:.3g}"]


def told_apart(a: Found, b: Found) -> list[str]:
    """Metrics that are not the same."""
    names = a.metrics.keys() | b.metrics.keys()
    same = {n for n in a.metrics.keys() & b.metrics.keys() if abs(a.metrics[n] - b.metrics[n]) <= 1e-9}
    return [f"{name}: {a.metrics.get(name)} and {b.metrics.get(name)}" for name in sorted(names - same)]
