"""How many rows each optimizer step takes: a constant batch, or one that grows with the tokens done. Integers only."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from truestep.recipe.stage import RampPoint, Stage


class _Segment(NamedTuple):
    """Steps [first_step, next segment's) take `rows` rows each; the first of them starts at row `first_row`."""

    first_step: int
    first_row: int
    rows: int


def step_rows(stage: Stage) -> tuple[int, int]:
    """The fewest and the most rows that a step of a stage reads; of one whose length is told in epochs, as if it came
    to all points of its ramp."""
    if stage.epochs:
        sizes = [stage.batch_tokens, *(point.batch_tokens for point in stage.ramp)]
        return min(sizes) // stage.context, max(sizes) // stage.context
    schedule = BatchSchedule.of(stage)
    rows = schedule.rows_in(0), schedule.rows_in(schedule.steps - 1)
    return min(rows), max(rows)


@dataclass(frozen=True)
class BatchSchedule:
    """R(k), the number of rows before step k, from the stage's numbers: all in tokens, the batch sizes multiples of
    `context`. A ramp point holds from the first step that begins with `after` or more tokens done. The last step is
    whole, so a stage trains on `tokens` rounded up to it."""

    tokens: int
    context: int
    batch_tokens: int
    ramp: tuple[RampPoint, ...] = ()

    @classmethod
    def of(cls, stage: Stage) -> "BatchSchedule":
        """The schedule of a stage."""
        return cls(stage.tokens, stage.context, stage.batch_tokens, tuple(stage.ramp))

    @cached_property
    def _segments(self) -> list[_Segment]:
        """One for each batch size that comes about, and the end."""
        step = row = 0
        segments: list[_Segment] = []
        sizes = [self.batch_tokens, *(point.batch_tokens for point in self.ramp)]
        ends = [*(min(point.after, self.tokens) for point in self.ramp), self.tokens]
        for batch_tokens, end in zip(sizes, ends, strict=True):
            rows, steps = batch_tokens // self.context, -((row * self.context - end) // batch_tokens)
            if steps > 0:
                segments.append(_Segment(step, row, rows))
                step, row = step + steps, row + steps * rows
        return [*segments, _Segment(step, row, 0)]

    @property
    def steps(self) -> int:
        """Optimizer steps of the stage."""
        return self._segments[-1].first_step

    @property
    def total_rows(self) -> int:
        """Rows of the stage."""
        return self._segments[-1].first_row

    def rows(self, step: int) -> tuple[int, int]:
        """[R(step), R(step + 1)): the rows that `step` (0-based) reads, counted from the start of the stage."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is not one of the {self.steps} steps of this stage")
        segment = self._segments[bisect_right(self._segments, step, key=lambda s: s.first_step) - 1]
        start = segment.first_row + (step - segment.first_step) * segment.rows
        return start, start + segment.rows

    def rows_in(self, step: int) -> int:
        """How many rows `step` reads."""
        start, stop = self.rows(step)
        return stop - start
