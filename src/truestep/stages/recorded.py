"""What the log says of the steps that a stage stands on: numbers, digests, and who computed them with what."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from truestep.data.shares import Shares
from truestep.errors import UserError
from truestep.recipe.degrees import Degrees
from truestep.runlog.log import read
from truestep.runlog.metrics import read_metrics
from truestep.runlog.records import AttemptStart, Decision, Digest, Record, StageStart, Step


@dataclass(frozen=True)
class Attempt:
    """One life of the processes, as far as bits depend on it."""

    number: int
    mesh: Degrees
    precision: str
    bits: dict[str, Any]
    turns: tuple[int, ...] = ()  # see data.shares; empty: equal shares

    def microbatch(self, rank: int, index: int) -> tuple[int, int]:
        """The number in its global batch of a rank's microbatch, and which part of the rows' tokens the rank has."""
        at, mesh = self.mesh.coordinate(rank), self.mesh
        shares = Shares(mesh.dp_replicate, mesh.dp_shard, lambda step: 0, self.turns)
        return shares.number(index, at.dp_replicate * mesh.dp_shard + at.dp_shard), at.cp


@dataclass(frozen=True)
class Done:
    """A step that was done: its record, and the digests of gradient and state where they were taken."""

    attempt: Attempt
    step: Step
    gradient: str | None = None
    state: str | None = None


@dataclass(frozen=True)
class Shard:
    """What one rank logged of one microbatch."""

    rank: int
    loss_sum: float
    weight: float
    grad_norm: float


@dataclass
class Recorded:
    """The steps of a stage that the run stands on, by number (from 1); where a later one began again, earlier ones of
    the same and later numbers have fallen away. `left_out`: rows of the data order that are not read after a step.
    `attempt`: the last one."""

    stage: str
    attempt: Attempt
    steps: dict[int, Done] = field(default_factory=dict)
    left_out: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def of(self, step: int) -> Attempt:
        """Who did a step; for one that was not done yet, the last attempt."""
        return self.steps[step].attempt if step in self.steps else self.attempt

    def back_to(self, step: int) -> None:
        """The run went back to the end of this step."""
        self.steps = {number: done for number, done in self.steps.items() if number <= step}
        self.left_out = {at: rows for at, rows in self.left_out.items() if at <= step}


def recorded(run_dir: Path, stage: str | None = None) -> Recorded:
    """Of `stage`, by default the one that began last. UserError if it has not begun."""
    records = list(read(run_dir))
    begun = list(dict.fromkeys(record.data.stage for record in records if isinstance(record.data, StageStart)))
    if not begun or stage not in (None, *begun):
        raise UserError(f"{run_dir} has not begun stage {stage!r}; stages that it began: {', '.join(begun) or 'none'}")
    return _collect(records, stage or begun[-1])


def _collect(records: Iterable[Record], stage: str) -> Recorded:
    found: Recorded | None = None
    world, bits = 1, {}
    for record in records:
        data = record.data
        if isinstance(data, AttemptStart):
            world, bits = data.world, data.bits
        if not isinstance(data, StageStart | Step | Digest | Decision) or data.stage not in (stage, None):
            continue
        if isinstance(data, StageStart):
            attempt = Attempt(record.attempt, _mesh(data, world), data.precision or "float32", bits)
            found = found or Recorded(stage, attempt)
            found.attempt = attempt
            found.back_to(data.start_step)
        elif found is not None:
            _take(found, data)
    assert found is not None
    return found


def _take(found: Recorded, data: Step | Digest | Decision) -> None:
    if isinstance(data, Step):
        found.back_to(data.step - 1)
        found.steps[data.step] = Done(found.attempt, data)
    elif isinstance(data, Digest) and data.step in found.steps:
        done = found.steps[data.step]
        texts = {"gradient": data.gradient or done.gradient, "state": data.state or done.state}
        found.steps[data.step] = replace(done, **texts)
    elif isinstance(data, Decision) and data.action == "rebalance":
        found.attempt = replace(found.attempt, turns=tuple(data.turns))
    elif isinstance(data, Decision) and data.action == "roll back" and data.to_step is not None:
        found.back_to(data.to_step)
        if data.left_out:
            found.left_out.setdefault(data.to_step, []).append((data.left_out[0], data.left_out[1]))


def _mesh(start: StageStart, world: int) -> Degrees:
    mesh = start.settings.get("mesh")
    return Degrees(**mesh) if mesh else Degrees(dp_shard=world)


def shards(run_dir: Path, found: Recorded, first: int, last: int) -> dict[int, dict[tuple[int, int], Shard]]:
    """By step in [first, last], and by (number of the microbatch, part of its tokens): what was logged of those that
    hold targets. Rows that were not written out yet, or were lost, are not there."""
    table = read_metrics(run_dir, found.stage)
    logged: dict[int, dict[tuple[int, int], Shard]] = {}
    columns = ("attempt", "rank", "step", "microbatch", "loss_sum", "weight", "grad_norm")
    for attempt, rank, step, index, loss_sum, weight, norm in zip(*(table[name].to_pylist() for name in columns)):
        done = found.steps.get(step)
        if first <= step <= last and weight > 0 and done is not None and done.attempt.number == attempt:
            key = done.attempt.microbatch(rank, index)
            logged.setdefault(step, {})[key] = Shard(rank, loss_sum, weight, norm)
    return logged
