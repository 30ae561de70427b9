"""Trials of silent corruption on real ranks: tiny models train, bits flip as planned, and what is found comes home."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests import tiny
from truestep.models.decoder import Decoder
from truestep.numerics.digest import state_digest
from truestep.recipe.machine import Mesh, Pipeline
from truestep.recipe.numerics import Numerics
from truestep.recipe.sentinel import Sentinel
from truestep.sentinel.inject import Flip, Injector
from truestep.train.guard import Corruption
from truestep.train.injection import place_injector
from truestep.train.integrity import Integrity
from truestep.train.step import train_step

ALL = Sentinel(digest_share=1.0, sweep_every=1, replay_share=1.0)
"""Everything is looked at in every step."""
OFF = Sentinel(digest_share=0.0, sweep_every=0, replay_share=0.0)


@dataclass(frozen=True)
class Setting:
    """What trains: a mesh, and how gradients are summed."""

    world: int = 1
    mesh: dict[str, int] = field(default_factory=dict)
    reduction: str = "fast"
    pipeline: dict[str, Any] = field(default_factory=dict)
    rows: int = 2  # of a microbatch
    precision: str = "float32"
    model: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    "one": Setting(),
    "ddp 2": Setting(2, {"dp_replicate": 2, "dp_shard": 1}),
    "ddp 3": Setting(3, {"dp_replicate": 3, "dp_shard": 1}),
    "fsdp 3": Setting(3, {"dp_shard": 3}),
    "hsdp 4": Setting(4, {"dp_replicate": 2, "dp_shard": 2}, rows=1),
    "exact ddp 3": Setting(3, {"dp_replicate": 3, "dp_shard": 1}, "exact"),
    "exact fsdp 3": Setting(3, {"dp_shard": 3}, "exact"),
    "exact one": Setting(1, {}, "exact"),
    "tp 2": Setting(4, {"dp_shard": 2, "tp": 2}, rows=3),
    "cp 2": Setting(4, {"dp_shard": 2, "cp": 2}, rows=3),
    "pp 2": Setting(4, {"dp_shard": 2, "pp": 2}, rows=3, pipeline={"schedule": "1f1b"}),
    "exact pp 2": Setting(4, {"dp_shard": 2, "pp": 2}, "exact", rows=3, pipeline={"schedule": "1f1b"}),
}


@dataclass
class Told:
    """What rank 0 says of a trial. `faults`: of the first step in which any were found, in which it ended; `step`: that
    step. `struck`: of all ranks, how often a bit was flipped. `weights`: digest after all steps."""

    faults: list[Any] = field(default_factory=list)
    step: int | None = None
    struck: int = 0
    weights: str = ""
    losses: list[float] = field(default_factory=list)


def start(rank: int, world: int, setting: Setting):
    """The state of a tiny model; every rank is on a host of its own."""
    here = replace(tiny.job(rank, world), hosts=tuple(f"host{r}" for r in range(world)))
    options = {"pipeline": Pipeline(**setting.pipeline)} if setting.pipeline else {}
    with torch.device("meta"):
        model = Decoder(tiny.section(**setting.model))
    numerics = Numerics(reduction=setting.reduction)  # pyright: ignore[reportArgumentType]
    return tiny.state(
        here, mesh=Mesh(**setting.mesh), numerics=numerics, precision=setting.precision, model=model, **options
    )


def trial(
    rank: int,
    world: int,
    setting: Setting,
    flips: Sequence[Flip],
    settings: Sentinel,
    steps: int,
    nan_at: Sequence[int] = (),
) -> Told:
    """Train some steps; stop where something is found. `nan_at`: forward passes of the last rank, counted from 0, that
    come out as no number."""
    training = start(rank, world, setting)
    injector = Injector(flips, rank, f"host{rank}") if flips else None
    guard = Integrity(training, settings, "tiny", injector)
    training.guard = guard
    if injector is not None:
        place_injector(injector, training)
    if rank == world - 1 and nan_at:
        _spoil(next(iter(training.parallel.parts[0].blocks.children())), nan_at)  # pyright: ignore
    told = Told()
    groups = training.parallel.groups
    for batch in tiny.rows(steps):
        mine = tiny.share(batch, groups.data_rank, groups.data_size, setting.rows)
        try:
            result = train_step(training, mine, batch.num_targets, [])
            told.losses.append(result.loss)
            told.faults = [alarm.fault for alarm in guard.after(result)]
        except Corruption as found:
            told.faults = found.faults
        if told.faults:
            break
    told.step = told.faults[0].step if told.faults else None
    told.struck = int(training.job.all_sum([float(len(injector.struck) if injector else 0)])[0])
    training.parallel.zero_grad()
    told.weights = state_digest(training.tensors())
    return told


def _spoil(block: torch.nn.Module, passes: Sequence[int]) -> None:
    count = iter(range(10**6))
    block.register_forward_hook(lambda module, given, out: out * float("nan") if next(count) in passes else None)
