"""Sets of moments in time, as intervals that do not overlap: what is covered, and what of it something else covers."""

from collections.abc import Iterable

Interval = tuple[float, float]
"""(begin, end) of one unit of time, begin <= end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that any of the intervals covers, in order; intervals that touch are one."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > begin:
            joined.append((begin, end))
    return joined


def without(covered: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """The moments of `covered` that `taken` does not cover."""
    cuts, left = union(taken), []
    at = 0
    for begin, end in union(covered):
        while at < len(cuts) and cuts[at][1] <= begin:
            at += 1
        look = at
        while look < len(cuts) and cuts[look][0] < end:
            if cuts[look][0] > begin:
                left.append((begin, cuts[look][0]))
            begin = cuts[look][1]
            look += 1
        if begin < end:
            left.append((begin, end))
    return left


def within(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """The moments from `begin` to `end` that the intervals cover."""
    return union((max(first, begin), min(last, end)) for first, last in intervals if first < end and last > begin)


def length(intervals: Iterable[Interval]) -> float:
    """How long the intervals cover in all."""
    return sum(end - begin for begin, end in union(intervals))
