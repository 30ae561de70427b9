"""Mixture: closed-form counts, a bound on their error, caps, and the same answer for any access pattern."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.data.mixture import Mixture, _scaled
from truestep.errors import DataError

weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9)
FEW_ROWS = 400


def bound(sources: int) -> float:
    return math.ceil(math.log2(sources)) / 2 + 1e-6


@given(weights, st.integers(0, 2**60))
def test_counts_stay_within_the_bound(w: list[float], rows: int):
    counts = Mixture(w, [None] * len(w)).counts(rows)
    assert sum(counts) == rows
    total = sum(map(Fraction, w))
    for count, weight in zip(counts, w):
        # 2**-64 a pair is the rounding of a share to its integer
        assert abs(count - rows * Fraction(weight) / total) <= bound(len(w)) + rows * Fraction(len(w), 2**64)


@settings(deadline=None)
@given(weights)
def test_rows_of_each_corpus_are_counted_off_without_a_gap(w: list[float]):
    mixture = Mixture(w, [None] * len(w))
    sources, locals_ = mixture.locate(np.arange(FEW_ROWS))
    for source in range(len(w)):
        assert locals_[sources == source].tolist() == list(range(mixture.counts(FEW_ROWS)[source]))


@settings(deadline=None)
@given(weights, st.data())
def test_any_access_pattern_agrees(w: list[float], data: st.DataObject):
    caps = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 80)), min_size=len(w), max_size=len(w)))
    mixture = Mixture(w, caps)
    total = FEW_ROWS if mixture.num_rows is None else min(FEW_ROWS, mixture.num_rows)
    sources, locals_ = mixture.locate(np.arange(total))
    rows = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=30)), dtype=np.int64)
    some_sources, some_locals = Mixture(w, caps).locate(rows)
    assert some_sources.tolist() == sources[rows].tolist()
    assert some_locals.tolist() == locals_[rows].tolist()


@settings(deadline=None)
@given(weights, st.data())
def test_caps_end_a_corpus_and_nothing_is_lost(w: list[float], data: st.DataObject):
    caps = data.draw(st.lists(st.integers(1, 60), min_size=len(w), max_size=len(w)))
    mixture = Mixture(w, caps)
    assert mixture.num_rows == sum(caps)
    sources, locals_ = mixture.locate(np.arange(sum(caps)))
    for source, cap in enumerate(caps):
        assert locals_[sources == source].tolist() == list(range(cap))
    with pytest.raises(DataError, match=rf"row {sum(caps)} is wanted .* ends after {sum(caps)} rows"):
        mixture.locate(np.array([sum(caps)]))


def test_a_capped_corpus_leaves_its_share_to_the_others():
    mixture = Mixture([2.0, 1.0, 1.0], [50, None, None])
    assert mixture.num_rows is None
    sources, _ = mixture.locate(np.arange(1000))
    last = int(np.flatnonzero(sources == 0)[-1])
    assert (sources == 0).sum() == 50 and abs(last - 100) <= 2
    tail = sources[last + 1 :]
    assert abs((tail == 1).sum() - len(tail) / 2) <= bound(2)


def test_rows_far_out_are_as_exact_as_near_ones():
    mixture = Mixture([0.7, 0.2, 0.1], [None] * 3)
    far = 10**17
    sources, locals_ = mixture.locate(np.arange(far, far + 1000))
    before, after = mixture.counts(far), mixture.counts(far + 1000)
    for source in range(3):
        assert locals_[sources == source].tolist() == list(range(before[source], after[source]))


@given(st.integers(0, 2**62), st.integers(1, 2**64 - 1))
def test_the_wide_product_is_exact(rows: int, share: int):
    assert int(_scaled(np.array([rows], dtype=np.uint64), share)[0]) == (rows * share + 2**63) >> 64


def test_a_vanishing_share_does_not_hang():
    mixture = Mixture([1.0, 1e-300], [None, 1])
    assert mixture.num_rows is None
    assert mixture.locate(np.arange(5))[0].tolist() == [0] * 5


@pytest.mark.parametrize("w", [[], [0.0], [1.0, -1.0], [math.inf], [math.nan]])
def test_bad_weights_are_refused(w: list[float]):
    with pytest.raises(DataError, match="must be positive and finite"):
        Mixture(w, [None] * len(w))
