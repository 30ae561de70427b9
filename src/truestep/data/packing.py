"""From documents to rows of one fixed length: which tokens row i holds, where documents begin in it, what is a target.

To add a policy: a class with `num_rows`, `report`, `rows` and `targets`, and an entry in `open_packing`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from truestep.data.best_fit import RowIndex, open_row_index
from truestep.data.blocks import ragged
from truestep.data.store import TokenStore
from truestep.errors import DataError

IGNORE = -100
"""The same value as truestep.numerics.batch.IGNORE; this module does without torch."""


@dataclass(frozen=True)
class Rows:
    """B rows of T tokens, with the fields and meanings of truestep.numerics.batch.Batch, as numpy arrays."""

    tokens_BT: np.ndarray
    labels_BT: np.ndarray
    positions_BT: np.ndarray
    documents_BT: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A column of places: `shape` follows (B, T)."""

    dtype: np.dtype
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pieces:
    """Where the tokens of some rows lie, row by row: tokens [starts[i], starts[i] + lengths[i]) of the store in row
    rows[i] of those asked for, from place columns[i] on."""

    starts: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    def places(self, context: int) -> np.ndarray:
        """The place of each of these tokens, counted over all places of the rows."""
        return ragged(self.rows * context + self.columns, self.lengths)


NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})


class Packing(Protocol):
    """`num_rows` rows over one pass of a store. `report` counts tokens_in, tokens_out, dropped_tokens, padding_tokens,
    ...; tokens_in = tokens_out + dropped_tokens. `columns`: those that its rows have."""

    num_rows: int
    report: dict[str, int]

    @property
    def columns(self) -> Mapping[str, Column]: ...

    def rows(self, indices: np.ndarray) -> Rows:
        """The rows at `indices`, in that order."""
        ...

    def targets(self, indices: np.ndarray) -> int:
        """How many targets these rows have together, without reading their tokens."""
        ...

    def pieces(self, indices: np.ndarray) -> Pieces:
        """The tokens that the places of these rows hold."""
        ...


class SplitPacking:
    """All documents as one stream, cut every T tokens: row i reads tokens [iT, iT + T + 1), the last of which is only a
    label, so that every token but the stream's first is looked at as a target once. The last row may be short.

    With `mask_documents` documents are apart: they do not see each other, positions restart, and the first token of a
    document is no target. A document that a row cuts goes on in the next one from position 0.
    """

    columns = NO_COLUMNS

    def __init__(self, store: TokenStore, context: int, mask_documents: bool):
        if store.num_tokens < 2:
            raise DataError(f"{store.path}: holds {store.num_tokens} tokens, too few for one target; add documents")
        self._store, self._context, self._mask = store, context, mask_documents
        self.num_rows = -(-(store.num_tokens - 1) // context)
        tokens = store.num_tokens
        places = self.num_rows * context
        self.report = {
            "documents": store.num_documents,
            "tokens_in": tokens,
            "tokens_out": tokens,
            "dropped_tokens": 0,
            "rows": self.num_rows,
            "padding_tokens": max(0, places - tokens),
        }

    def rows(self, indices: np.ndarray) -> Rows:
        starts, lengths = self._spans(indices)
        borders = self._borders(starts, lengths) if self._mask else None
        return _assemble(self._store.read(starts, lengths), lengths, borders, self._context)

    def targets(self, indices: np.ndarray) -> int:
        starts, lengths = self._spans(indices)
        return int((lengths - 1).sum()) - (len(self._borders(starts, lengths)[0]) if self._mask else 0)

    def pieces(self, indices: np.ndarray) -> Pieces:
        starts = indices * self._context
        lengths = np.minimum(self._context, self._store.num_tokens - starts)
        return Pieces(starts, lengths, np.arange(len(indices)), np.zeros_like(starts))

    def _spans(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = indices * self._context
        return starts, np.minimum(self._context + 1, self._store.num_tokens - starts)

    def _borders(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row, column) of every document start but one at column 0, each once."""
        first, last = np.split(self._store.document_at(np.concatenate([starts, starts + lengths - 1])), 2)
        rows = np.repeat(np.arange(len(starts)), last - first)
        columns = self._store.offsets_at(ragged(first + 1, last - first)) - starts[rows]
        if len(rows) and (columns.min() < 1 or (columns >= lengths[rows]).any()):
            raise DataError(f"{self._store.path}: document offsets do not increase; the index of the file is damaged")
        new = np.ones(len(rows), dtype=bool)  # a document of no tokens begins where the next one does
        new[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
        return rows[new], columns[new]


class BestFitPacking:
    """Whole documents put into rows of T tokens by best-fit-decreasing, so none is cut but those longer than a row.

    A document of more than T tokens is, by `too_long`: cut to T (truncate), refused (refuse), or cut every T tokens
    into pieces that overlap by one, as SplitPacking cuts its stream (split; for pretraining, since a piece lacks what
    came before). The last token of a document predicts nothing with `mask_documents`, else the next document of the
    row.
    """

    columns = NO_COLUMNS

    def __init__(
        self, store: TokenStore, context: int, mask_documents: bool, too_long: str, folder: Path | None = None
    ):
        self._store, self._context, self._mask = store, context, mask_documents
        self._index: RowIndex = open_row_index(store, context, too_long, folder)
        self.num_rows, self.report = self._index.num_rows, self._index.report

    def rows(self, indices: np.ndarray) -> Rows:
        starts, lengths, row_of = self._index.pieces(indices)
        filled = np.bincount(row_of, lengths, minlength=len(indices)).astype(np.int64)
        borders = None
        if self._mask:
            columns = _columns(lengths, filled, row_of)
            borders = row_of[columns > 0], columns[columns > 0]
        return _assemble(self._store.read(starts, lengths), filled, borders, self._context)

    def pieces(self, indices: np.ndarray) -> Pieces:
        starts, lengths, row_of = self._index.pieces(indices)
        filled = np.bincount(row_of, lengths, minlength=len(indices)).astype(np.int64)
        columns = _columns(lengths, filled, row_of)
        return Pieces(starts, np.minimum(lengths, self._context - columns), row_of, columns)

    def targets(self, indices: np.ndarray) -> int:
        starts, lengths, _ = self._index.pieces(indices)
        return int(lengths.sum()) - (len(starts) if self._mask else len(indices))


def _columns(lengths: np.ndarray, filled: np.ndarray, row_of: np.ndarray) -> np.ndarray:
    """Where in its row each piece begins."""
    return np.cumsum(lengths) - lengths - (np.cumsum(filled) - filled)[row_of]


def open_packing(
    kind: str, store: TokenStore, context: int, mask_documents: bool, too_long: str, folder: Path | None = None
) -> Packing:
    """The policy named `kind` of [data.*]. `folder`: where best-fit keeps its index, by default the store's folder."""
    if kind == "split":
        return SplitPacking(store, context, mask_documents)
    if kind == "best-fit":
        return BestFitPacking(store, context, mask_documents, too_long, folder)
    raise DataError(f"packing {kind!r} is unknown; use split or best-fit")


def _assemble(
    flat: np.ndarray, filled_B: np.ndarray, borders: tuple[np.ndarray, np.ndarray] | None, context: int
) -> Rows:
    """Rows from their tokens one after the other, filled_B[i] <= T + 1 of row i. `borders`: (row, column) where a
    document begins inside a row, in any order, None if documents are not kept apart. Masks come from lengths, never
    from ids."""
    num_rows, columns = len(filled_B), np.arange(context + 1)
    is_full = bool((filled_B == context + 1).all())
    inside_BU = columns < filled_B[:, None]  # U = T + 1
    if is_full:
        full_BU = flat.reshape(num_rows, context + 1)
    else:
        full_BU = np.zeros((num_rows, context + 1), dtype=flat.dtype)
        full_BU[inside_BU] = flat
    tokens_BT, labels_BT = full_BU[:, :-1].astype(np.int64), full_BU[:, 1:].astype(np.int64)
    row_starts = np.arange(num_rows) * context
    begins = row_starts  # of documents, counted over the places of all rows
    if borders is not None:
        rows, at = borders
        labels_BT[rows, at - 1] = IGNORE
        begins = np.sort(np.concatenate([row_starts, (rows * context + at)[at < context]]))
    lengths = np.diff(begins, append=num_rows * context)
    positions_BT = (np.arange(num_rows * context) - np.repeat(begins, lengths)).reshape(num_rows, context)
    numbers = np.arange(len(begins)) - np.searchsorted(begins, row_starts)[begins // context]
    documents_BT = np.repeat(numbers.astype(np.int32), lengths).reshape(num_rows, context)
    if not is_full:
        labels_BT[~inside_BU[:, 1:]] = IGNORE
        padding_BT = ~inside_BU[:, :-1]
        documents_BT[padding_BT], positions_BT[padding_BT] = -1, 0
    return Rows(tokens_BT, labels_BT, positions_BT, documents_BT)
