"""Which corpus gives global row k, and which of its rows: a closed formula, the same however the rows are visited.

Two corpora with shares p and 1 - p: the first has given round(k p) of the first k rows, the other the rest, so row k is
the first's where that count steps up. More corpora form a balanced binary tree of such pairs, each counting the rows
that reach it. Every pair rounds once, so after any k rows each corpus has given its share of k to within
ceil(log2(corpora)) / 2 rows.

A corpus with a cap leaves at the row where its count reaches the cap; from there on a new tree without it shares the
rows, and the bound counts from there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from truestep.errors import DataError

_HALF, _ONE = 1 << 63, 1 << 64
_LAST = 1 << 62


@dataclass(frozen=True)
class _Pair:
    """Rows that reach this node go left or right; `share` is the left one's part of them in units of 2**-64."""

    share: int
    left: "_Pair | int"
    right: "_Pair | int"

    def left_of(self, rows: int) -> int:
        return (rows * self.share + _HALF) >> 64


@dataclass(frozen=True)
class _Phase:
    """From global row `start` on the corpora of `tree` share the rows; `given` counts what each gave before."""

    start: int
    given: tuple[int, ...]
    tree: "_Pair | int"


class Mixture:
    """Rows of corpora by weight. `num_rows` is the length of the mixture, None while a corpus has no cap."""

    def __init__(self, weights: Sequence[float], caps: Sequence[int | None]):
        """weights: positive, of any scale. caps: most rows that a corpus gives (epochs times its rows), or None."""
        if not weights or not all(w > 0 and math.isfinite(w) for w in weights):
            raise DataError(f"mixture weights {list(weights)} must be positive and finite; leave out unused corpora")
        self.num_sources = len(weights)
        self._phases: list[_Phase] = []
        self.num_rows: int | None = self._plan([Fraction(w) for w in weights], list(caps))
        self._starts = np.array([phase.start for phase in self._phases], dtype=np.int64)

    def _plan(self, weights: list[Fraction], caps: list[int | None]) -> int | None:
        start, given = 0, [0] * len(weights)
        active = [i for i, cap in enumerate(caps) if cap is None or cap > 0]
        while active:
            tree = _tree(active, weights)
            self._phases.append(_Phase(start, tuple(given), tree))
            lengths = {i: _rows_until(tree, i, cap - given[i]) for i in active if (cap := caps[i]) is not None}
            length = min(lengths.values(), default=_LAST)
            if length >= _LAST:
                return None
            for i in active:
                given[i] += _count(tree, i, length)
            start += length
            active = [i for i in active if caps[i] is None or given[i] < caps[i]]  # type: ignore[operator]
        return start

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` global rows each corpus gives."""
        phase = max((p for p in self._phases if p.start <= rows), key=lambda p: p.start)
        counts = list(phase.given)
        for source in _leaves(phase.tree):
            counts[source] += _count(phase.tree, source, rows - phase.start)
        return counts

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Global rows (int64, any order) to (corpus, row of that corpus counted from 0 and over epochs), int64 each."""
        if len(rows) and (rows.min() < 0 or (self.num_rows is not None and rows.max() >= self.num_rows)):
            raise DataError(
                f"row {rows.max()} is wanted of a mixture that ends after {self.num_rows} rows; "
                "raise max_epochs, add data, or train on fewer tokens"
            )
        sources, locals_ = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
        phases = np.searchsorted(self._starts, rows, side="right") - 1
        for index in np.unique(phases).tolist():
            phase, where = self._phases[index], np.flatnonzero(phases == index)
            _descend(phase.tree, (rows[where] - phase.start).astype(np.uint64), where, sources, locals_)
            locals_[where] += np.array(phase.given)[sources[where]]
        return sources, locals_


def _tree(sources: list[int], weights: list[Fraction]) -> "_Pair | int":
    if len(sources) == 1:
        return sources[0]
    left, right = sources[: len(sources) // 2], sources[len(sources) // 2 :]
    share = sum(weights[i] for i in left) / sum(weights[i] for i in sources)
    # A share that rounds to nothing or to everything would starve a corpus for ever.
    return _Pair(min(max(round(share * _ONE), 1), _ONE - 1), _tree(left, weights), _tree(right, weights))


def _leaves(tree: "_Pair | int") -> list[int]:
    return [tree] if isinstance(tree, int) else _leaves(tree.left) + _leaves(tree.right)


def _count(tree: "_Pair | int", source: int, rows: int) -> int:
    """How many of the first `rows` rows that reach `tree` are the source's."""
    while isinstance(tree, _Pair):
        left = tree.left_of(rows)
        tree, rows = (tree.left, left) if source in _leaves(tree.left) else (tree.right, rows - left)
    return rows


def _rows_until(tree: "_Pair | int", source: int, wanted: int) -> int:
    """The fewest rows of which `wanted` are the source's; the count never falls, so bisection finds it."""
    low, high = 0, _LAST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _count(tree, source, middle) >= wanted else (middle + 1, high)
    return low


def _descend(
    tree: "_Pair | int", rows: np.ndarray, where: np.ndarray, sources: np.ndarray, locals_: np.ndarray
) -> None:
    if isinstance(tree, int):
        sources[where], locals_[where] = tree, rows.astype(np.int64)
        return
    before = _scaled(rows, tree.share)
    is_left = _scaled(rows + np.uint64(1), tree.share) > before
    _descend(tree.left, before[is_left], where[is_left], sources, locals_)
    _descend(tree.right, (rows - before)[~is_left], where[~is_left], sources, locals_)


def _scaled(rows: np.ndarray, share: int) -> np.ndarray:
    """round(rows * share / 2**64) in uint64: the 128-bit product is built from four of 32 x 32 bits."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    low, high = np.uint64(share & 0xFFFFFFFF), np.uint64(share >> 32)
    row_low, row_high = rows & mask, rows >> shift
    first = row_high * low + (row_low * low >> shift)
    second = row_low * high + (first & mask)
    product_high = row_high * high + (first >> shift) + (second >> shift)
    product_low = rows * np.uint64(share)
    return product_high + (product_low >> np.uint64(63))
