"""Sets of moments: exact numbers, and random ones against counting."""

from hypothesis import given
from hypothesis import strategies as st

from truestep.train.intervals import length, union, within, without

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))))


def moments(intervals) -> set[int]:
    return {moment for begin, end in intervals for moment in range(begin, end)}


def test_union_joins_what_overlaps_or_touches():
    assert union([(5, 7), (1, 2), (2, 3), (6, 9), (4, 4)]) == [(1, 3), (5, 9)]
    assert union([(1, 8), (2, 3)]) == [(1, 8)]


def test_without_cuts_holes():
    assert without([(0, 10)], [(2, 3), (5, 6)]) == [(0, 2), (3, 5), (6, 10)]
    assert without([(0, 2), (4, 6)], [(1, 5)]) == [(0, 1), (5, 6)]
    assert without([(0, 4), (6, 8)], [(0, 9)]) == []
    assert without([(0, 4)], []) == [(0, 4)]


def test_within_clips():
    assert within([(0, 3), (4, 9), (8, 12)], 2, 10) == [(2, 3), (4, 10)]
    assert within([(0, 2)], 2, 3) == []


def test_length_counts_each_moment_once():
    assert length([(0, 2), (1, 4), (10, 11)]) == 5


@given(INTERVALS, INTERVALS)
def test_like_sets(a, b):
    assert moments(union(a)) == moments(a) and length(a) == len(moments(a))
    assert moments(without(a, b)) == moments(a) - moments(b)
    assert moments(within(a, 5, 20)) == moments(a) & set(range(5, 20))
