"""Permutation: a bijection, well mixed, and a function of (n, seed, epoch, stream) only."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.data.order import Permutation


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_every_row_once(n: int, seed: int, epoch: int):
    order = Permutation(n, seed, epoch)[np.arange(n)]
    assert sorted(order.tolist()) == list(range(n))


@given(st.integers(2**40, 2**62), st.lists(st.integers(0, 2**40 - 1), min_size=1, max_size=20, unique=True))
def test_huge_orders_need_no_table(n: int, places: list[int]):
    rows = Permutation(n, 1, 2)[np.array(places)]
    assert len(set(rows.tolist())) == len(places)
    assert rows.min() >= 0 and rows.max() < n


@given(st.integers(1, 500), st.data())
def test_any_access_pattern_agrees(n: int, data: st.DataObject):
    order = Permutation(n, 7, 3)
    whole = order[np.arange(n)]
    places = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    assert order[np.array(places, dtype=np.int64)].tolist() == whole[places].tolist()
    assert [order[i] for i in places] == whole[places].tolist()


def test_seed_epoch_and_stream_each_change_the_order():
    orders = {tuple(Permutation(50, *key)[np.arange(50)]) for key in [(0, 0), (1, 0), (0, 1), (0, 0, 1), (1, 1)]}
    assert len(orders) == 5


def test_the_order_is_pinned():
    """A changed order would make old checkpoints resume into other data."""
    assert Permutation(10, 0, 0)[np.arange(10)].tolist() == [5, 1, 2, 9, 4, 6, 8, 3, 0, 7]
    assert Permutation(10**12, 5, 9)[np.array([0, 1, 10**12 - 1])].tolist() == [436369610016, 414754044022, 51419906719]


@pytest.mark.parametrize("n", [3, 4])
def test_small_orders_are_near_uniform(n: int):
    """Every order of n rows comes about equally often over seeds: chi-square far below the 1e-6 quantile."""
    trials = 2000
    seen = Counter(tuple(Permutation(n, seed, 0)[np.arange(n)]) for seed in range(trials))
    cells = {3: 6, 4: 24}[n]
    expected = trials / cells
    chi2 = sum((count - expected) ** 2 / expected for count in seen.values()) + (cells - len(seen)) * expected
    assert chi2 < {3: 35.9, 4: 72.0}[n]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_mixes_like_chance(seed: int):
    """Neighbours land far apart, places and rows are uncorrelated, and no stride survives (an LCG would fail here)."""
    n = 20_000
    order = Permutation(n, seed, 0)[np.arange(n)]
    sigma = 1 / np.sqrt(n)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 6 * sigma
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 6 * sigma
    strides = Counter(((order[1:] - order[:-1]) % n).tolist())
    assert max(strides.values()) < 12  # Poisson with mean 1: more than 11 has chance 1e-9 a stride
    halves = (order[: n // 2] < n // 2).sum()
    assert abs(halves - n / 4) < 6 * np.sqrt(n / 16)
    other = Permutation(n, seed, 1)[np.arange(n)]
    assert (order == other).sum() < 15


def test_outside_places_are_refused():
    with pytest.raises(IndexError):
        Permutation(4, 0, 0)[np.array([4])]
    with pytest.raises(ValueError):
        Permutation(0, 0, 0)
