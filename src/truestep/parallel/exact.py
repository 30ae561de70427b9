"""`numerics.reduction = "exact"`: gradients, their norm and the loss of a step, the same bits at every degree of
dp_replicate, dp_shard and pp, and however microbatches are spread over ranks and time.

The gradient of each use of a parameter in each microbatch is rounded to integers, by the parameter's scale, before
anything is added to it; from there on all sums are of integers. A step that does not fit its scales is computed again:

    while True:
        with exact.step():
            for each of this rank's microbatches:
                ...forward and backward...
                exact.sweep()
        outcome = exact.finish([losses])
        if not outcome.redo:
            break

Largest magnitudes are exact too, so all ranks choose the next scales alike, whatever the mesh, and one repetition is
enough. The very first step of a run, whose scales nobody knows, is computed twice.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from truestep.numerics.exact_sum import LIMBS, from_limbs, to_limbs
from truestep.numerics.fixed_point import UNKNOWN, exponent_for, fits, next_exponent, squares_to_float
from truestep.parallel.exact_bucket import Bucket, HookedBucket, Route, Scales, Slot, peaks, squares
from truestep.parallel.probe import GradientProbe

TRIES = 3
"""Computations of one step: one may meet new magnitudes, one a damaged collective."""


@dataclass(frozen=True)
class Outcome:
    """How a computation of a step ended, the same on all ranks. `redo`: compute it again, nothing of it is left. `norm`
    (before clipping) is infinite where gradients are not finite, or where TRIES computations were in vain. `trouble`:
    nothing, "overflow", "not finite", "damaged" (bits changed in a collective), or "not repeated" (an overflow that was
    not there when the same was computed again: no data has done that)."""

    redo: bool
    norm: float
    sums: list[float]
    trouble: str = ""


class Exact:
    """The exact reduction of one rank. `names`: all parameters of the whole model, also those of other ranks, in one
    order. `uses`: names of tensors that are a second use of one of those, by which they go. `control` (gloo, the whole
    job; None: one process) is for agreements.

    `broken`: of the step, pairs of ranks (giver, receiver) in this rank's groups between which bits changed; `gave_up`:
    they did so in every computation of it."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        device: torch.device,
        control: dist.ProcessGroup | None,
        probe: GradientProbe,
        uses: Mapping[str, str] | None = None,
    ):
        self.scales = Scales(names, uses or {}, device, probe)
        self.exponents = torch.full((len(names),), UNKNOWN, dtype=torch.int16)
        self._control = control
        self._buckets: list[Bucket] = []
        self._joins: list[Callable[[], None]] = []
        self._tries = 0
        self.broken: list[tuple[int, int]] = []
        self.gave_up = False
        self._overflowed: tuple[list[int], list[float]] | None = None  # exponents, magnitudes

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """For the checkpoint; filled in place by a load. The same on every rank."""
        return {"exact.exponents": self.exponents}

    def watch(self, params: Mapping[str, torch.nn.Parameter], route: Callable[[str], Route]) -> HookedBucket:
        """Reduce plain parameters, whole on this rank. Their `.grad` is empty between microbatches."""
        bucket = HookedBucket(self.scales, params, route)
        self.include(bucket)
        return bucket

    def include(self, bucket: Bucket) -> None:
        """Buckets are completed in this order: ranks of a group include theirs in the same one."""
        self._buckets.append(bucket)

    def join(self, action: Callable[[], None]) -> None:
        """Do this once all buckets are complete, before they become gradients."""
        self._joins.append(action)

    def integers(self, name: str) -> torch.Tensor:
        """This rank's sums of a parameter, from the completion of its bucket to the end of `finish`."""
        bucket, slot = self._find(name)
        return bucket.part(slot)

    def sink(self, name: str) -> Callable[[torch.Tensor], None]:
        """For `as_use`: takes the gradients of a further use of a parameter."""
        bucket, slot = self._find(name)
        return lambda grad: self._take(bucket, slot, grad)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around forward and backward of all microbatches of a step."""
        self.scales.begin(self.exponents.tolist())
        for bucket in self._buckets:
            bucket.begin()
        if self._tries == 0:
            self.broken, self.gave_up, self._overflowed = [], False, None
        self._tries += 1
        try:
            yield
        except BaseException:
            self._drop()
            self._tries = 0
            raise
        finally:
            self.scales.open = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around forward and backward of microbatches whose gradients are thrown away, when no step is open."""
        self.scales.begin(self.exponents.tolist())
        for bucket in self._buckets:
            bucket.begin()
        try:
            yield
        finally:
            self.scales.open = False
            self._drop()

    def sweep(self) -> None:
        """Call it after each microbatch's backward pass (in pipelines: each that makes gradients of weights)."""
        for bucket in self._buckets:
            bucket.sweep()

    def finish(self, sums: Sequence[Sequence[float]]) -> Outcome:
        """Complete the gradients, once `step` is over. Collective. `sums`: this rank's summands of each of some
        quantities, to be added up over all ranks."""
        for bucket in self._buckets:
            bucket.complete()
        for join in self._joins:
            join()
        grads = [pair for bucket in self._buckets for pair in bucket.fill()]
        mine = torch.cat([self.scales.largest_P, peaks(self.scales, grads)])
        agreed = self._agree(mine.nan_to_num(nan=math.inf).cpu(), dist.ReduceOp.MAX)
        largest, peak = agreed[: len(agreed) // 2], agreed[len(agreed) // 2 :]
        exponents = self.scales.exponents
        finite = all(map(math.isfinite, largest))
        fitting = finite and all(map(fits, exponents, largest))

        limbs = [limb for values in sums for limb in to_limbs(values)]
        squared = squares(self.scales, grads, peak) if fitting else torch.zeros(len(peak), 2, dtype=torch.int64)
        numbers = [self.scales.residual.view(1).cpu(), torch.tensor(limbs, dtype=torch.int64), squared.flatten().cpu()]
        residual, *rest = self._agree(torch.cat(numbers), dist.ReduceOp.SUM)
        totals = [from_limbs(rest[start : start + LIMBS]) for start in range(0, len(limbs), LIMBS)]
        if residual:
            self.broken += self.scales.trail.broken()
            again = self._again("damaged", totals)
            self.gave_up = not again.redo
            return again
        if finite and not fitting:
            self._overflowed = list(exponents), largest
            self._set([e if fits(e, x) else exponent_for(x) for e, x in zip(exponents, largest)])
            return self._again("overflow", totals)
        if finite and self._overflowed is not None and self._overflowed[1] != largest:
            before, self._overflowed = self._overflowed[0], None
            self._set([e if fits(e, x) else exponent_for(x) for e, x in zip(before, largest)])
            return self._again("not repeated", totals)
        self._tries = 0
        if not finite:
            return Outcome(False, math.inf, totals, "not finite")
        self._set([next_exponent(e, x) for e, x in zip(exponents, largest)])
        high_low = rest[len(limbs) :]
        return Outcome(False, squares_to_float(high_low[::2], high_low[1::2], peak), totals)

    def _find(self, name: str) -> tuple[Bucket, Slot]:
        found = ((bucket, bucket.slot(name)) for bucket in self._buckets)
        return next((bucket, slot) for bucket, slot in found if slot is not None)

    def _take(self, bucket: Bucket, slot: Slot, grad: torch.Tensor) -> None:
        self.scales.probe.add(grad, lambda: [(slot.name, grad)])
        bucket.take(slot, grad)

    def _again(self, trouble: str, totals: list[float]) -> Outcome:
        redo = self._tries < TRIES
        if redo:
            self._drop()
        else:
            self._tries = 0
        return Outcome(redo, math.inf, totals, trouble)

    def _drop(self) -> None:
        for bucket in self._buckets:
            bucket.drop()

    def _set(self, exponents: list[int]) -> None:
        self.exponents.copy_(torch.tensor(exponents, dtype=torch.int16))

    def _agree(self, numbers: torch.Tensor, op: dist.ReduceOp.RedOpType) -> list:
        if self._control is not None:
            dist.all_reduce(numbers, op=op, group=self._control)
        return numbers.tolist()
