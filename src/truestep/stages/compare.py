"""A step that was done again beside what the log says of it: which bits were compared, and where the two part."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan

from truestep.numerics.fingerprint import combined
from truestep.numerics.pieces import natural
from truestep.runlog.digests import KINDS, Kind
from truestep.stages.recorded import Done, Shard

Part = tuple[int, int]
"""Number of a microbatch in its global batch, and of the part of its tokens (mesh.cp)."""
NORM_TOLERANCE = 1e-4
"""Relative, for norms of microbatches' gradients: on another mesh their squares are added up in another order."""


@dataclass(frozen=True)
class Again:
    """A step as it came out here. `digests`: of every tensor, by kind, where they were taken."""

    step: int
    loss: float
    grad_norm: float
    skipped: bool
    shards: Mapping[Part, Shard]
    digests: Mapping[Kind, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Parting:
    """Where a step parts from the log. `what`: everything that differs, in words. `rank`: of the run, which computed
    the microbatch. `parameter`: the first one that differs, with `others` more."""

    step: int
    what: tuple[str, ...]
    microbatch: int | None = None
    rank: int | None = None
    parameter: str | None = None
    kind: Kind | None = None
    others: int = 0

    @property
    def sentence(self) -> str:
        place = f"step {self.step}"
        if self.microbatch is not None:
            place += f", microbatch {self.microbatch}" + (
                "" if self.rank is None else f" (rank {self.rank} of the run)"
            )
        if self.parameter is None:
            return f"parts at {place}: {'; '.join(self.what)}"
        more = f" and {self.others} more" if self.others else ""
        return f"parts at {place}, first in parameter {self.parameter} ({self.kind}){more}: {'; '.join(self.what)}"


@dataclass(frozen=True)
class Compared:
    """One step: its loss here, whether it parts, and how many figures were compared: microbatches, and kinds of digest
    (loss and gradient norm always are)."""

    step: int
    loss: float
    microbatches: int
    digests: tuple[Kind, ...]
    parting: Parting | None


def same_bits(a: float, b: float) -> bool:
    """Equal to the last bit; one NaN is as good as another, since the log writes only "nan"."""
    return struct.pack("<d", a) == struct.pack("<d", b) or (isnan(a) and isnan(b))


def compare(
    done: Done,
    logged: Mapping[Part, Shard],
    rows: Mapping[Kind, Mapping[str, int]],
    again: Again,
    *,
    same_mesh: bool,
) -> Compared:
    """`logged`: the microbatches in the log; `rows`: its digests of every tensor, as far as they are there.
    `same_mesh`: norms of microbatches can be compared to the last bit."""
    what = [
        f"{name} {old!r} in the log, {new!r} here"
        for name, old, new in (
            ("loss", done.step.loss, again.loss),
            ("gradient norm", done.step.grad_norm, again.grad_norm),
        )
        if not same_bits(old, new)
    ]
    if done.step.skipped != again.skipped:
        what.append(f"the update was {'' if done.step.skipped else 'not '}skipped in the log")
    both = sorted(logged.keys() & again.shards.keys())
    other = [part for part in both if not same_bits(logged[part].loss_sum, again.shards[part].loss_sum)]
    if other:
        old, new = logged[other[0]].loss_sum, again.shards[other[0]].loss_sum
        number = f"{len(other)} microbatch{'' if len(other) == 1 else 'es'}"
        what.append(f"loss sum of {number}, first {old!r} in the log, {new!r} here")
    texts: dict[Kind, str | None] = {"gradient": done.gradient, "state": done.state}
    kinds: tuple[Kind, ...] = tuple(
        kind for kind in KINDS if again.digests.get(kind) is not None and texts[kind] is not None
    )
    parted: list[Kind] = [kind for kind in kinds if _text(again.digests[kind]) != texts[kind]]
    what += [f"digest of the {kind}" for kind in parted]
    if not what:
        return Compared(again.step, again.loss, len(both), kinds, None)
    first = other[0] if other else _by_norm(logged, again.shards, both, same_mesh)
    names = _differing(parted, rows, texts, again)
    return Compared(again.step, again.loss, len(both), kinds, _parting(again.step, what, first, logged, names))


def _parting(
    step: int, what: list[str], first: Part | None, logged: Mapping[Part, Shard], names: list[tuple[Kind, str]]
) -> Parting:
    microbatch, rank = (None, None) if first is None else (first[0], logged[first].rank)
    kind, parameter = names[0] if names else (None, None)
    return Parting(step, tuple(what), microbatch, rank, parameter, kind, max(0, len(names) - 1))


def _by_norm(
    logged: Mapping[Part, Shard], here: Mapping[Part, Shard], both: list[Part], same_mesh: bool
) -> Part | None:
    """The microbatch whose gradient's norm differs, where all losses are the same."""
    for part in both:
        old, new = logged[part].grad_norm, here[part].grad_norm
        known = not isnan(old) and not isnan(new)
        if known and (not same_bits(old, new) if same_mesh else abs(old - new) > NORM_TOLERANCE * max(old, new)):
            return part
    return None


def _differing(
    parted: list[Kind], rows: Mapping[Kind, Mapping[str, int]], texts: Mapping[Kind, str | None], again: Again
) -> list[tuple[Kind, str]]:
    """Tensors whose digests differ, gradients first, in natural order; none where the log's rows are not those of its
    record."""
    found: list[tuple[Kind, str]] = []
    for kind in parted:
        old, new = rows.get(kind, {}), again.digests[kind]
        if _text(old) == texts[kind]:
            names = (name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
            found.extend((kind, name) for name in sorted(names, key=natural))
    return found


def _text(values: Mapping[str, int]) -> str:
    return combined(values.keys(), values.values())
