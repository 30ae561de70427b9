"""The parity harness: a composition on ranks against one process, before clipping and optimizer, and after some steps.

Ranks train with the real state and the real step. Their gradients come home whole and are compared with the oracle's,
which is computed here, in the parent, where no rank's code was ever changed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel import oracle
from tests.parallel.compositions import Composition
from tests.parallel.mutations import mutated
from tests.pool import Pool
from truestep.checkpoint.catalogue import begin_epoch, newest
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.control import Group, begin_job
from truestep.checkpoint.load import load
from truestep.data.loader import padding
from truestep.data.packing import Column
from truestep.models.build import init_weights
from truestep.models.decoder import Decoder
from truestep.numerics.batch import Batch
from truestep.numerics.pieces import Piece, stream_whole
from truestep.parallel.apply import Fill
from truestep.parallel.job import Job
from truestep.recipe.numerics import Numerics
from truestep.recipe.stage import Stage
from truestep.storage.local import LocalStore
from truestep.train.build import build
from truestep.train.state import TrainState
from truestep.train.step import train_step

GRADIENT = {"float64": 1e-10, "float32": 2e-6}
"""Largest difference of a gradient, of the loss or of the norm, relative to the largest element of the tensor."""
ROUNDING = 8.0
"""In float32 a gradient may besides be off by so many times what plain float32 autograd is, where that is more: where
terms cancel, as in norms of keys, no order of summing gives 2e-6. A sum made in bfloat16 would be off by thousands."""
WEIGHT = {
    "sgd": {"float64": 1e-8, "float32": 1e-3},
    "adamw": {"float64": 1e-6, "float32": 1e-2},
}
"""The same of a weight, a loss or a norm after the steps. Errors grow from step to step, so in float32 only what is
grossly wrong shows here. AdamW divides by the gradient's size, and so turns what is zero but for rounding into steps of
nearly full length."""

PATIENCE_S = 240.0
"""A composition takes seconds; on a machine that is busy with other things, a minute."""

Whole = dict[str, torch.Tensor]


@dataclass
class Found:
    """What rank 0 brings home: whole tensors by name, figures of every step."""

    gradients: Whole = field(default_factory=dict)
    weights: Whole = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    nlls: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    saved: Whole = field(default_factory=dict)


@dataclass
class Report:
    """Largest relative differences of one composition, each with where it is: of a gradient of the first step, of a
    weight, loss or norm after all steps. `excess` is by how many times a gradient, a loss or the norm of the first step
    is further off than it may be. `same_bits`: what was saved on this mesh and loaded on another is the same; None
    where that was not tried."""

    composition: Composition
    gradient: tuple[float, str] = (0.0, "")
    excess: tuple[float, str] = (0.0, "")
    weight: tuple[float, str] = (0.0, "")
    same_bits: bool | None = None

    def faults(self) -> list[str]:
        """Sentences, one for each bound that does not hold."""
        kind = self.composition.precision
        found = []
        if not self.excess[0] <= 1:
            found.append(f"first step: {self.excess[1]} is off by {self.excess[0]:.3g} times as much as is allowed")
        error, where = self.weight
        if not error <= (bound := WEIGHT[self.composition.optimizer][kind]):
            found.append(f"afterwards: {where} is off by {error:.2e}, and {bound:.0e} is allowed")
        if self.same_bits is False:
            found.append("checkpoint: other bits after it was loaded on another mesh")
        return found


def check(
    pool: Pool, one: Composition, folder: Path, *, steps: int = 2, elsewhere: Composition | None = None, mutation=""
) -> Report:
    """Train `one` for `steps`, and if there is an `elsewhere`, load there what was saved here. `mutation` names the
    change to make to the ranks' code."""
    place = str(folder / "store") if elsewhere else ""
    if elsewhere:
        begin_epoch(LocalStore(place))
    wanted = list(oracle.train(one, steps))
    attempts = [step.attempt for step in wanted]
    found = pool.run(ranks_train, one.world, one, attempts, place, mutation, timeout_s=PATIENCE_S)[0]
    report = compare(one, found, wanted)
    if elsewhere:
        loaded = pool.run(ranks_load, elsewhere.world, elsewhere, place, mutation, timeout_s=PATIENCE_S)[0]
        report.same_bits = same_bits(found.saved, loaded)
    return report


def compare(one: Composition, found: Found, wanted: list[oracle.Step]) -> Report:
    gradients = errors(found.gradients, wanted[0].gradients)
    figures = [
        {
            "loss": _figure(found.losses[step], want.loss),
            "nll": _figure(found.nlls[step], want.nll),
            "norm": _figure(found.norms[step], want.norm),
        }
        for step, want in enumerate(wanted)
    ]
    first, bound = gradients | figures[0], GRADIENT[one.precision]
    rounding = oracle.rounding(one) if one.precision == "float32" and worst(first)[0] > bound else {}
    excess = {name: error / max(bound, ROUNDING * rounding.get(name, 0.0)) for name, error in first.items()}
    later = {f"{name} of step {step}": error for step, named in enumerate(figures) for name, error in named.items()}
    weights = errors(found.weights, wanted[-1].weights)
    return Report(one, worst(gradients), worst(excess), worst(weights | later))


def errors(found: Whole, wanted: Whole) -> dict[str, float]:
    """The largest difference of each tensor relative to its largest element. Infinite for a name too many or too few,
    another shape, and what is no number."""
    common = [name for name in wanted if name in found and found[name].shape == wanted[name].shape]
    alike = {name: oracle.relative(found[name], wanted[name]) for name in common}
    return alike | {
        f"{name} (another shape, or missing)": inf for name in (found.keys() | wanted.keys()) - alike.keys()
    }


def worst(by_name: Mapping[str, float]) -> tuple[float, str]:
    return max(((error, name) for name, error in by_name.items()), default=(0.0, ""))


def _figure(found: float, wanted: float) -> float:
    error = abs(found - wanted) / max(abs(wanted), oracle.TINY)
    return error if error == error else inf


def same_bits(a: Whole, b: Whole) -> bool:
    """Whether both hold the same tensors, bit for bit."""
    alike = a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].shape == b[n].shape for n in a)
    return alike and all(torch.equal(_bytes(a[n]), _bytes(b[n])) for n in a)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


# what runs on the ranks


def ranks_train(rank: int, world: int, one: Composition, attempts: list[int], folder: str, mutation: str) -> Found:
    """Train a step on each of these draws of its batch; gradients of the first step, weights after the last."""
    with mutated(mutation):
        state = start(rank, world, one)
        found = Found()
        for step, attempt in enumerate(attempts):
            batch = oracle.global_batch(one, step, attempt)
            with captured(state, found) if step == 0 else _clipped(state):
                result = train_step(state, share(one, batch, rank), batch.num_targets, [])
            found.losses.append(result.loss)
            found.nlls.append(result.metrics["nll"])
            found.norms.append(result.grad_norm)
        found.weights = whole(state.parallel.pieces())
        if folder:
            save(state, folder)
            found.saved = whole(state.tensors())
        return found if rank == 0 else Found()


def ranks_load(rank: int, world: int, one: Composition, folder: str, mutation: str) -> Whole:
    """All tensors of the state, after they were loaded on this mesh."""
    with mutated(mutation):
        state = start(rank, world, one, own=False)
        store = LocalStore(folder)
        group = Group.of(_key_values(world), rank, world, PATIENCE_S)
        committed = newest(store)
        assert committed is not None
        load(store, committed, state.tensors(), group=group)
        found = whole(state.tensors())
        return found if rank == 0 else {}


def start(
    rank: int,
    world: int,
    one: Composition,
    own: bool = True,
    *,
    stage: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    reduction: str = "fast",
    prepare: Callable[[nn.Module, Any, Fill, int], Fill] | None = None,
) -> TrainState:
    """The state at step 0; with the composition's own weights, or with the first weights of a run. `stage`, `model`:
    fields that are otherwise than a pretraining stage's, or than the composition's section. `prepare`: what puts the
    stage's adapters into the model (train.adapt)."""
    begin_job()  # a rank of the pool has been in other worlds than its peers
    control = dist.new_group(backend="gloo") if world > 1 else None
    job = Job(rank, world, rank, world, torch.device("cpu"), "test", control, None)
    fields = {
        "name": "tiny",
        "data": "x",
        "context": one.context,
        "tokens": 10_000,
        "batch_tokens": one.rows * one.context,
        "optim": {"clip_norm": 0, "schedule": {"kind": "constant", "warmup": 0}, **OPTIMIZERS[one.optimizer]},
        "loss": {"z_loss": oracle.Z_LOSS if one.z_loss else 0.0},
    }
    section = one.section().model_copy(update=dict(model or {}))
    with torch.device("meta"):
        decoder = Decoder(section)
    values = oracle.whole_weights(one, section)

    def own_values(_: nn.Module, pieces: dict[str, Piece]) -> None:
        for name, piece in pieces.items():
            piece.local.copy_(values[name][piece.region])

    asked = Stage(**(fields | dict(stage or {})))
    fill: Fill = own_values if own else lambda model, pieces: init_weights(model, 3, pieces)
    return build(
        asked,
        decoder,
        fill if prepare is None else prepare(decoder, asked.lora, fill, 1),
        job=job,
        machine=one.machine(),
        precision=one.precision,
        seed=1,
        steps=100,
        numerics=Numerics(reduction=reduction),
    )


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "tests.parallel.harness:plain_sgd", "lr": oracle.LR},
    "adamw": {"lr": oracle.ADAM_LR, "betas": oracle.BETAS, "eps": oracle.EPS, "weight_decay": 0.0},
}


def plain_sgd(named_params, roles, lr: float) -> torch.optim.Optimizer:
    """An optimizer of the user's own: nothing that would hide a factor in a gradient."""
    return torch.optim.SGD([parameter for _, parameter in named_params], lr=lr)


def share(one: Composition, batch: Batch, rank: int) -> list[Batch]:
    """This rank's microbatches, as the loader deals them out: microbatch j to data coordinate j % dp."""
    place = one.degrees.coordinate(rank)
    number = place.dp_replicate * one.dp_shard + place.dp_shard
    filled = -len(batch.tokens_BT) % one.size
    pieces = [batch.map(lambda x, at=at: x[at : at + one.size]) for at in range(0, len(batch.tokens_BT), one.size)]
    if filled:
        pieces[-1] = pieces[-1].map(lambda *parts: torch.cat(parts), nothing(batch, filled))
    pieces += [nothing(batch, one.size)] * (-len(pieces) % one.degrees.data_parallel)
    return pieces[number :: one.degrees.data_parallel]


def nothing(like: Batch, rows: int) -> Batch:
    """Rows of padding with the columns of a batch, as the loader makes them."""
    columns = {
        name: Column(np.dtype(str(column.dtype).removeprefix("torch.")), tuple(column.shape[2:]))
        for name, column in like.columns.items()
    }
    return padding(rows, like.tokens_BT.shape[1], columns)


@contextmanager
def captured(state: TrainState, found: Found) -> Iterator[None]:
    """Keep the gradients with which the optimizer is called; nothing clips them."""
    update = state.optimizer.step

    def keep() -> None:
        found.gradients = whole(state.parallel.gradients())
        update()

    state.optimizer.step = keep  # pyright: ignore[reportAttributeAccessIssue]
    yield
    state.optimizer.step = update  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _clipped(state: TrainState) -> Iterator[None]:
    state.section = state.section.model_copy(update={"clip_norm": oracle.CLIP_NORM})
    yield


def whole(pieces: Mapping[str, Piece]) -> Whole:
    """Whole tensors, on rank 0; nothing elsewhere."""
    return {name: x.clone() for name, x in stream_whole(pieces) if x is not None}


def save(state: TrainState, folder: str) -> None:
    job = state.job
    checkpointer = Checkpointer(
        LocalStore(folder),
        attempt=1,
        rank=job.rank,
        world=job.world,
        kv=_key_values(job.world),
        block_bytes=1024,
        deadline_s=PATIENCE_S,
    )
    result = checkpointer.save(state.step, state.tensors(), state.extra(), asynchronous=False).result()
    checkpointer.close()
    assert result.ok, result.error


def _key_values(world: int) -> Any:
    return dist.distributed_c10d._get_default_store() if world > 1 else None
