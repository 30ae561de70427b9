"""The matrix of silent corruption: site x bit x rank x once or always, on one small job that is built once.

Each trial puts the state back to where it began, flips, and trains on. A flip is *effective* if, unwatched, it changes
the final weights. Columns: found; rightly located (the rank is named, or, if it cannot be, is among the suspects);
wrongly named; steps from the flip to the alarm.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import mean

import torch
import torch.distributed as dist

from tests import tiny
from tests.train import sdc
from truestep.numerics.fingerprint import fingerprints
from truestep.recipe.sentinel import Sentinel
from truestep.sentinel.inject import SITES, Flip, Injector
from truestep.train.guard import Corruption
from truestep.train.injection import place_injector
from truestep.train.integrity import Integrity
from truestep.train.state import TrainState
from truestep.train.step import train_step

FIRST = 2
"""The step in which a bit flips (the first with a step before it)."""


@dataclass(frozen=True)
class Outcome:
    """Of one flip. `after`: steps from the flip's to the one in which it was found; None: it was not."""

    flip: Flip
    struck: bool
    effective: bool
    after: int | None = None
    kind: str = ""
    named: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()

    @property
    def located(self) -> bool:
        return self.flip.rank in self.named or (not self.named and self.flip.rank in self.suspects)

    @property
    def wrongly_named(self) -> bool:
        return any(rank != self.flip.rank for rank in self.named)


@dataclass
class Series:
    """A small job on this rank, which begins again as often as is asked."""

    setting: sdc.Setting
    rank: int
    world: int
    steps: int
    training: TrainState = field(init=False)

    def __post_init__(self) -> None:
        self.training = sdc.start(self.rank, self.world, self.setting)
        self.training.optimizer.step = _borne(self.training.optimizer.step)  # pyright: ignore[reportAttributeAccessIssue]
        self._injector = Injector([Flip(site, 10**9) for site in SITES], self.rank, f"host{self.rank}")
        place_injector(self._injector, self.training)
        groups = self.training.parallel.groups
        share = groups.data_rank, groups.data_size, self.setting.rows
        self._data = [(tiny.share(batch, *share), batch.num_targets) for batch in tiny.rows(self.steps)]
        self._begin = {name: piece.local.clone() for name, piece in self.training.tensors().items()}
        self._extra = self.training.extra()
        self.train([], sdc.OFF)  # DDP sums in other buckets in its very first step
        self.train([], sdc.OFF)
        self.clean = self.weights()

    def train(self, flips: Sequence[Flip], settings: Sentinel, guarded: bool = True) -> list:
        """From the beginning to the end, or to the first fault; the faults."""
        state = self.training
        for name, piece in state.tensors().items():
            piece.local.copy_(self._begin[name])
        state.restore(self._extra)
        self._injector.load(flips)
        state.guard = guard = Integrity(state, settings, "tiny", self._injector) if guarded else None
        for mine, num_targets in self._data:
            try:
                result = train_step(state, mine, num_targets, [])
                faults = [alarm.fault for alarm in guard.after(result)] if guard else []
            except Corruption as found:
                faults = found.faults
                state.parallel.zero_grad()
                state.parallel.probe.take()
            if faults:
                return faults
        return []

    def weights(self) -> str:
        """Of weights and optimizer, the same on all ranks: every rank's own parts, copies too."""
        tensors = self.training.tensors()
        held = {name: piece for name, piece in tensors.items() if name != "exact.exponents"}
        mine = fingerprints({name: piece.local for name, piece in held.items()}, sorted(held)).cpu()
        told = [torch.empty_like(mine) for _ in range(self.world)]
        if self.world == 1:
            return str(mine.tolist())
        dist.all_gather(told, mine)
        return str([each.tolist() for each in told])

    def outcome(self, flip: Flip, settings: Sentinel) -> Outcome:
        self.train([flip], sdc.OFF)
        struck = self.training.job.all_sum([float(len(self._injector.struck))])[0] > 0
        effective = self.weights() != self.clean
        faults = self.train([flip], settings)
        if not faults:
            return Outcome(flip, struck, effective)
        named = tuple(sorted({fault.rank for fault in faults if fault.rank is not None}))
        suspects = tuple(sorted({rank for fault in faults for rank in fault.evidence["ranks"]}))
        return Outcome(flip, struck, effective, faults[0].step - flip.step, faults[0].kind, named, suspects)


def _borne(step: Callable[[], None]) -> Callable[[], None]:
    """AdamW divides by zero if its count of updates has been flipped from 1 to -1. A run would crash there; here the
    rank goes on without that update, so that the others do not wait for it."""

    def step_or_not() -> None:
        with suppress(ArithmeticError):
            step()

    return step_or_not


def plan(count: int, world: int, seed: int, sites: Sequence[str] = SITES) -> list[Flip]:
    """`count` flips, evenly over sites and over once and always, of random bits, ranks, tensors and elements."""
    draw, flips = random.Random(seed), []
    for number in range(count):
        flips.append(
            Flip(
                sites[(number + seed) % len(sites)],
                FIRST,
                draw.randrange(world),
                tensor=draw.randrange(10**6),
                element=draw.randrange(10**9),
                bit=draw.randrange(32),
                sticky=number // len(sites) % 2 == 1,
                microbatch=draw.randrange(2),
            )
        )
    return flips


def outcomes(
    rank: int, world: int, setting: sdc.Setting, flips: Sequence[Flip], settings: Sentinel, steps: int
) -> list[Outcome]:
    """For tests.pool: the same on every rank."""
    series = Series(setting, rank, world, steps)
    return [series.outcome(flip, settings) for flip in flips]


def clean(rank: int, world: int, setting: sdc.Setting, settings: Sentinel, steps: int, times: int) -> int:
    """False alarms in `times` clean runs of `steps`, and runs that ended with other weights."""
    series = Series(setting, rank, world, steps)
    return sum(bool(series.train([], settings)) + (series.weights() != series.clean) for _ in range(times))


def cost(rank: int, world: int, setting: sdc.Setting, settings: Sentinel | None, steps: int) -> float:
    """CPU seconds of this rank for a step (None: without any guard)."""
    series = Series(setting, rank, world, steps)
    guarded = settings is not None
    series.train([], settings or sdc.OFF, guarded)
    began = time.process_time()
    series.train([], settings or sdc.OFF, guarded)
    return (time.process_time() - began) / steps


def table(found: Sequence[Outcome]) -> str:
    """Rows by site, once and always."""
    rows: dict[tuple[str, bool], list[Outcome]] = defaultdict(list)
    for one in found:
        rows[one.flip.site, one.flip.sticky].append(one)
    lines = [
        "| site | times | flips | effective | found | located | wrongly named | steps to alarm |",
        "|---" * 8 + "|",
    ]
    for (site, sticky), some in sorted(rows.items(), key=lambda row: (SITES.index(row[0][0]), row[0][1])):
        real = [one for one in some if one.effective]
        hits = [one for one in real if one.after is not None]
        share = [
            f"{100 * len(part) / max(len(real), 1):.1f} %" for part in (hits, [one for one in hits if one.located])
        ]
        wrong = sum(one.wrongly_named for one in some)
        late = f"{mean(one.after or 0 for one in hits):.2f}" if hits else "-"
        times = "always" if sticky else "once"
        lines.append(f"| {site} | {times} | {len(some)} | {len(real)} | {share[0]} | {share[1]} | {wrong} | {late} |")
    return "\n".join(lines)
