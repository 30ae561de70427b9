"""Who is slow, and since when: each rank's own time beside that of ranks with equal work, and beside its own past.

A rank's *own* time is what it spends without waiting for others. With a share of the work of its kind,

    against others   t / median of the others' t          where some have equal work
    against before   t / median of its own earlier t's     the same of the others taken out, since steps may get longer

A rank is slow in a window if the first is SLOW or more (where nobody has equal work: the second), and its distance from
the others is FAR times what lies between them. It is named when that holds in MOST of the last WINDOWS windows.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from truestep.sentinel.spikes import middle_and_spread

SLOW = 1.25
FAR = 5.0
FLOOR = 0.02
"""Least spread, as a part of the median, that is taken for noise."""
WINDOWS, MOST = 4, 3
PAST = 20
"""Windows of its own past that a rank is compared with."""


@dataclass(frozen=True)
class Slow:
    """A rank that is named: its own time as a multiple of the others', and of its own before (None: not known)."""

    rank: int
    against_others: float | None
    against_before: float | None


class Stragglers:
    """`classes`: for each rank, a number that ranks with equal work share. Everything is computed from numbers that all
    ranks have alike."""

    def __init__(self, classes: Sequence[int]):
        self._classes = classes
        self._past: list[deque[float]] = [deque(maxlen=PAST) for _ in classes]
        self._marks: list[deque[bool]] = [deque(maxlen=WINDOWS) for _ in classes]
        self._recent: list[deque[float]] = [deque(maxlen=MOST) for _ in classes]

    def look(self, own_R: Sequence[float]) -> list[Slow]:
        """Take in a window, each rank's own time of a step; the ranks that are slow by now."""
        others = [self._against_others(own_R, rank) for rank in range(len(own_R))]
        before = self._against_before(own_R)
        for rank, own in enumerate(own_R):
            score = before[rank] if others[rank] is None else others[rank]
            slow = score is not None and score >= SLOW and self._far(own_R, rank)
            self._marks[rank].append(slow)
            self._recent[rank].append(own)
            if not slow:
                self._past[rank].append(own)
        named = [rank for rank, marks in enumerate(self._marks) if sum(marks) >= MOST and marks[-1]]
        return [Slow(rank, others[rank], before[rank]) for rank in named]

    def pace(self, ranks: Sequence[int]) -> float:
        """Own time of a step of ranks that go in step: the slowest one's, of late."""
        return max(median(self._recent[rank]) for rank in ranks)

    def _equals(self, rank: int) -> list[int]:
        mine = self._classes[rank]
        return [other for other, its in enumerate(self._classes) if its == mine and other != rank]

    def _against_others(self, own_R: Sequence[float], rank: int) -> float | None:
        usual = median([own_R[other] for other in self._equals(rank)] or [0.0])
        return own_R[rank] / usual if usual > 0 else None

    def _against_before(self, own_R: Sequence[float]) -> list[float | None]:
        ratios = [own / median(past) if past and median(past) > 0 else None for own, past in zip(own_R, self._past)]
        found: list[float | None] = []
        for rank, ratio in enumerate(ratios):
            rest = [other for at, other in enumerate(ratios) if at != rank and other is not None]
            found.append(ratio / median(rest) if ratio is not None and rest and median(rest) > 0 else ratio)
        return found

    def _far(self, own_R: Sequence[float], rank: int) -> bool:
        """Whether the rank lies apart from what is usual among its equals, or in its own past, by their spread."""
        usual = [own_R[other] for other in self._equals(rank)] or list(self._past[rank])
        middle, spread = middle_and_spread(usual)
        return own_R[rank] - middle >= FAR * max(spread, FLOOR * middle)
