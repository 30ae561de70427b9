"""From samples to rows of one fixed length: whole units put into rows by best-fit, every sample a document of its own.

Each token of a sample has a place, its last one too, so that what a model says of a whole sample can be read there. The
label of a place is the sample's next token where that is a target, which its role says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from truestep.data.best_fit import best_fit, index_folder, write_index
from truestep.data.blocks import BlockReader, open_folder, ragged, taken
from truestep.data.packing import IGNORE, Column, Pieces, Rows
from truestep.data.sample_store import SampleStore
from truestep.data.samples import EARLIER, LAST
from truestep.errors import DataError

FORMAT = "truestep sample rows 1"
LossOn = Literal["assistant", "last", "all"]
TARGETS: dict[LossOn, tuple[int, ...]] = {"assistant": (EARLIER, LAST), "last": (LAST,), "all": tuple(range(256))}
"""Roles of tokens that are targets. The first token of a sample never is one."""
_COUNTED_TOKENS = 1 << 22
_UNIT_COLUMNS = {
    "unit": Column(np.dtype("int32")),
    "side": Column(np.dtype("int8")),
    "counted": Column(np.dtype("float32")),
    "value": Column(np.dtype("float32")),
}
_WEIGHT_COLUMNS = {name: Column(np.dtype("float32")) for name in ("weight", "counted")}


@dataclass(frozen=True)
class Supervision:
    """Which tokens are targets, and what is said of places beside their labels. `units`: the columns unit, side,
    counted, value; `by_sample`: weight, which is 1 over the number of targets of the sample, and counted."""

    loss_on: LossOn = "assistant"
    by_sample: bool = False
    units: bool = True

    @property
    def columns(self) -> dict[str, Column]:
        """Those that rows have."""
        found = dict(_UNIT_COLUMNS) if self.units else {}
        return found | (dict(_WEIGHT_COLUMNS) if self.by_sample else {})


class SamplePacking:
    """Units put into rows of T tokens by best-fit-decreasing.

    A unit of more than T tokens is, by `too_long`: refused (refuse), left out (drop), or cut at its end (truncate), its
    longest samples first. A unit of which a sample has no target, by its roles or since they were cut off, is left out.
    The report counts all of them. Columns, zero in padding: see Supervision."""

    def __init__(self, store: SampleStore, context: int, too_long: str, use: Supervision, folder: Path | None = None):
        self._store, self._context, self._use = store, context, use
        self._index = open_index(store, context, too_long, use.loss_on, folder)
        self.num_rows, self.report = self._index.num_rows, self._index.report

    @property
    def columns(self) -> dict[str, Column]:
        return self._use.columns

    def pieces(self, indices: np.ndarray) -> Pieces:
        return self._index.samples(self._store, indices).pieces

    def targets(self, indices: np.ndarray) -> int:
        return int(self._index.take("targets.bin", "<i4", self._index.which(indices)[0]).sum())

    def rows(self, indices: np.ndarray) -> Rows:
        placed, shape = self._index.samples(self._store, indices), (len(indices), self._context)
        pieces = placed.pieces
        places = pieces.places(self._context)
        tokens_BT, labels_BT = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        positions_BT, documents_BT = np.zeros(shape, np.int64), np.full(shape, -1, np.int32)
        ids = self._store.samples.read(pieces.starts, pieces.lengths)
        is_target = self._is_target(placed)
        tokens_BT.flat[places] = ids
        labels_BT.flat[places[:-1][is_target[1:]]] = ids[1:][is_target[1:]]
        positions_BT.flat[places] = ragged(np.zeros_like(pieces.lengths), pieces.lengths)
        documents_BT.flat[places] = np.repeat(placed.numbers, pieces.lengths)
        columns = self._columns(placed, places, labels_BT != IGNORE)
        return Rows(tokens_BT, labels_BT, positions_BT, documents_BT, columns)

    def _is_target(self, placed: "Placed") -> np.ndarray:
        """Of every token of these pieces. The first one of a sample is none."""
        pieces = placed.pieces
        wanted = np.isin(self._store.roles(pieces.starts, pieces.lengths), TARGETS[self._use.loss_on])
        wanted[np.cumsum(pieces.lengths) - pieces.lengths] = False
        return wanted

    def _columns(self, placed: "Placed", places: np.ndarray, has_label_BT: np.ndarray) -> dict[str, np.ndarray]:
        shape, lengths, store = has_label_BT.shape, placed.pieces.lengths, self._store
        columns = {name: np.zeros(shape, column.dtype) for name, column in self.columns.items()}
        if "counted" in columns:
            firsts = places[np.cumsum(lengths) - lengths]
            columns["counted"].flat[firsts[placed.opens]] = 1.0
        if self._use.units:
            columns["unit"].flat[places] = np.repeat(placed.units, lengths)
            columns["side"].flat[places] = np.repeat(store.sides(placed.samples), lengths)
            columns["value"].flat[places] = self._values(placed)
        if self._use.by_sample:
            each = np.repeat((1.0 / placed.targets).astype(np.float32), lengths)
            columns["weight"].flat[places] = each
            columns["weight"][~has_label_BT] = 0.0
        return columns

    def _values(self, placed: "Placed") -> np.ndarray:
        pieces = placed.pieces
        if self._store.values_by_token:
            return self._store.token_values(pieces.starts, pieces.lengths)
        return np.repeat(self._store.values(placed.samples), pieces.lengths)


@dataclass(frozen=True)
class Placed:
    """The samples of some rows, row by row: where their tokens lie, their numbers in the store, in the row, of their
    unit in the row; whether a sample is the first of its unit; its targets."""

    pieces: Pieces
    samples: np.ndarray
    numbers: np.ndarray
    units: np.ndarray
    opens: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class SampleIndex:
    """Row i holds samples samples.bin[rows[i] : rows[i + 1]], cut to lengths.bin; units.bin numbers their units in the
    row, targets.bin counts their targets."""

    report: dict[str, int]
    readers: dict[str, BlockReader]

    @property
    def num_rows(self) -> int:
        return len(self.readers["rows.bin"].data) // 8 - 1

    def take(self, name: str, dtype: str, indices: np.ndarray) -> np.ndarray:
        return taken(self.readers[name], dtype, indices)

    def which(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The entries of these rows, and how many each row has."""
        first, stop = self.take("rows.bin", "<i8", indices), self.take("rows.bin", "<i8", indices + 1)
        return ragged(first, stop - first), stop - first

    def samples(self, store: SampleStore, indices: np.ndarray) -> Placed:
        """The samples of these rows."""
        which, counts = self.which(indices)
        samples, lengths = (
            self.take("samples.bin", "<i8", which),
            self.take("lengths.bin", "<i4", which).astype(np.int64),
        )
        units = self.take("units.bin", "<i4", which)
        rows = np.repeat(np.arange(len(indices)), counts)
        before = np.cumsum(lengths) - lengths
        columns = before - np.repeat(before[np.cumsum(counts) - counts], counts)
        opens = np.ones(len(which), dtype=bool)
        opens[1:] = (rows[1:] != rows[:-1]) | (units[1:] != units[:-1])
        pieces = Pieces(store.samples.offsets_at(samples), lengths, rows, columns)
        numbers = ragged(np.zeros_like(counts), counts)
        return Placed(pieces, samples, numbers, units, opens, self.take("targets.bin", "<i4", which))


def open_index(
    store: SampleStore, context: int, too_long: str, loss_on: LossOn, folder: Path | None = None
) -> SampleIndex:
    """The index for rows of `context` tokens; made on first use, then only mapped. Several processes may ask at once
    (see best_fit.open_row_index)."""
    name = f"{context}-{too_long}-{loss_on}"
    path = index_folder(store.path, name, store.fingerprint, folder)
    if not path.exists():
        arrays, report = _packed(store, context, too_long, loss_on)
        write_index(path, FORMAT, arrays, report)
    header, readers = open_folder(path, FORMAT)
    return SampleIndex(header["report"], readers)


def _packed(
    store: SampleStore, context: int, too_long: str, loss_on: LossOn
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays of the index, and the report."""
    if too_long == "split":
        text = 'too_long = "split" cuts text, and would tear these rows apart; write "truncate", "drop" or "refuse"'
        raise DataError(f"{store.path}: {text}")
    first = store.units_at(np.arange(store.num_units + 1))
    offsets = store.samples.offsets_at(np.arange(store.num_samples + 1))
    whole, unit_of = np.diff(offsets), np.repeat(np.arange(store.num_units), np.diff(first))
    long = np.bincount(unit_of, whole, minlength=store.num_units) > context
    lengths = whole.copy()
    if too_long == "refuse" and long.any():
        _refuse(store, int(np.flatnonzero(long)[0]), whole, first, context, int(long.sum()))
    if too_long == "truncate":
        for unit in np.flatnonzero(long).tolist():
            here = slice(first[unit], first[unit + 1])
            lengths[here] = np.minimum(lengths[here], fair_share(lengths[here], context))
    targets = np.concatenate([np.empty(0, np.int64), *_targets(store, offsets[:-1], lengths, loss_on)])
    bare = np.bincount(unit_of, targets == 0, minlength=store.num_units) > 0
    dropped = {"without_target": bare & ~long, "truncated_to_no_target": bare & long}
    if too_long == "drop":
        dropped = {"without_target": bare & ~long, "too_long": long}
    keep = ~np.logical_or.reduce(list(dropped.values()))
    if not keep.any():
        counts = ", ".join(f"{mask.sum()} {reason.replace('_', ' ')}" for reason, mask in dropped.items())
        raise DataError(
            f"{store.path}: no unit of {store.num_units} is left for rows of {context} tokens with loss on "
            f"{loss_on!r} ({counts}); raise context, or look at the rows with `truestep data inspect --stage`"
        )
    return _placed(store, context, keep, long, lengths, unit_of, targets, dropped)


def _placed(
    store: SampleStore,
    context: int,
    keep: np.ndarray,
    long: np.ndarray,
    lengths: np.ndarray,
    unit_of: np.ndarray,
    targets: np.ndarray,
    dropped: dict[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays of the index, and the report."""
    sizes = np.bincount(unit_of, lengths, minlength=store.num_units).astype(np.int64)[keep]
    row_of_unit = np.full(store.num_units, -1)
    row_of_unit[keep], num_rows = best_fit(sizes, context)
    samples = np.flatnonzero(keep[unit_of])
    size_of = np.zeros(store.num_units, np.int64)
    size_of[keep] = sizes
    unit = unit_of[samples]
    order = np.lexsort((samples, unit, -size_of[unit], row_of_unit[unit]))  # the longest unit of a row comes first
    samples, unit = samples[order], unit[order]
    row = row_of_unit[unit]
    counts = np.bincount(row, minlength=num_rows)
    begins = np.ones(len(unit), np.int64)
    begins[1:] = unit[1:] != unit[:-1]
    number = np.cumsum(begins) - 1
    starts = np.cumsum(counts) - counts
    arrays = {
        "rows.bin": np.append(0, np.cumsum(counts)).astype("<i8"),
        "samples.bin": samples.astype("<i8"),
        "lengths.bin": lengths[samples].astype("<i4"),
        "units.bin": (number - np.repeat(number[starts], counts)).astype("<i4"),
        "targets.bin": targets[samples].astype("<i4"),
    }
    filled = int(sizes.sum())
    report = {
        "units": store.num_units,
        "samples": len(samples),
        "tokens_in": store.num_tokens,
        "tokens_out": filled,
        "dropped_tokens": store.num_tokens - filled,
        "targets": int(targets[samples].sum()),
        "truncated": int((long & keep).sum()),
        **{f"dropped_{reason}": int(mask.sum()) for reason, mask in dropped.items()},
        "rows": num_rows,
        "padding_tokens": num_rows * context - filled,
    }
    return arrays, report


def fair_share(lengths: np.ndarray, total: int) -> int:
    """The largest length to which samples can be cut so that they have at most `total` tokens together."""
    left = total
    for number, length in enumerate(np.sort(lengths).tolist()):
        share = left // (len(lengths) - number)
        if length > share:
            return share
        left -= length
    return total


def _targets(store: SampleStore, starts: np.ndarray, lengths: np.ndarray, loss_on: LossOn) -> Iterator[np.ndarray]:
    """How many targets the first `lengths` tokens of each sample hold, some samples at a time."""
    ends = np.cumsum(lengths)
    at = 0
    while at < len(lengths):
        upto = max(at + 1, int(np.searchsorted(ends, ends[at] + _COUNTED_TOKENS)))
        here = lengths[at:upto]
        wanted = np.isin(store.roles(starts[at:upto], here), TARGETS[loss_on])
        before = np.append(0, np.cumsum(wanted))
        stops = np.cumsum(here)
        firsts = stops - here
        found = before[stops] - before[np.minimum(firsts + 1, stops)]
        yield found
        at = upto


def _refuse(store: SampleStore, unit: int, lengths: np.ndarray, first: np.ndarray, context: int, count: int) -> None:
    tokens = int(lengths[first[unit] : first[unit + 1]].sum())
    rows = store.rows_at(np.arange(store.num_documents + 1))
    row = int(np.searchsorted(rows, unit, side="right")) - 1
    raise DataError(
        f"{store.path}: row {row} has {tokens} tokens, more than {context} ({count} such rows); raise context, or set "
        f'too_long to "truncate" or "drop"'
    )
