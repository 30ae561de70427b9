"""Best-fit-decreasing: whole documents into rows, and the index of its result, kept beside the store as a mapped
file."""

import bisect
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from truestep.data.blocks import BlockReader, BlockWriter, commit_folder, open_folder, ragged, taken
from truestep.data.store import TokenStore
from truestep.errors import DataError
from truestep.files import writing

FORMAT = "truestep rows 1"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class RowIndex:
    """Row i holds pieces [rows[i], rows[i + 1]); piece j is tokens [starts[j], starts[j] + lengths[j]) of the store."""

    report: dict[str, int]
    rows: BlockReader
    starts: BlockReader
    lengths: BlockReader

    @property
    def num_rows(self) -> int:
        return len(self.rows.data) // 8 - 1

    def pieces(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(start, length, which of `indices`) of all pieces of these rows, row by row, int64 each."""
        first, stop = taken(self.rows, "<i8", indices), taken(self.rows, "<i8", indices + 1)
        which = ragged(first, stop - first)
        row_of = np.repeat(np.arange(len(indices)), stop - first)
        return taken(self.starts, "<i8", which), taken(self.lengths, "<i4", which).astype(np.int64), row_of


def open_row_index(store: TokenStore, context: int, too_long: str, folder: Path | None = None) -> RowIndex:
    """The index for rows of `context` tokens; made on first use (about 100 bytes of memory a document), then only
    mapped.

    It lies in `folder` (by default the store's) under a name that holds what it depends on. Several processes may ask
    at once: each makes it, all make the same, and the first to finish publishes it.
    """
    path = index_folder(store.path, f"{context}-{too_long}", store.fingerprint, folder)
    if not path.exists():
        _build(store, context, too_long, path)
    header, readers = open_folder(path, FORMAT)
    return RowIndex(header["report"], readers["rows.bin"], readers["starts.bin"], readers["lengths.bin"])


def index_folder(store: Path, name: str, fingerprint: str, folder: Path | None) -> Path:
    """Where the index of a store lies that depends on what `name` says."""
    return (folder or (store if store.is_dir() else store.parent)) / f"rows-{store.name}-{name}-{fingerprint[:16]}"


def _build(store: TokenStore, context: int, too_long: str, path: Path) -> None:
    starts, lengths, report = _cut(store, context, too_long)
    row_of, num_rows = best_fit(np.minimum(lengths, context), context)
    # Within a row the longest document comes first, as it was placed.
    order = np.lexsort((np.arange(len(lengths)), -lengths, row_of))
    filled = int(np.minimum(lengths, context).sum())
    report |= {"rows": num_rows, "padding_tokens": num_rows * context - filled}
    bounds = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=num_rows))])
    arrays = {"rows.bin": bounds.astype("<i8"), "starts.bin": starts[order].astype("<i8")}
    arrays["lengths.bin"] = lengths[order].astype("<i4")
    write_index(path, FORMAT, arrays, report)


def write_index(path: Path, kind: str, arrays: dict[str, np.ndarray], report: dict[str, int]) -> None:
    """Publish these files at `path` as a folder of checked blocks, whole, unless another process was first."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    with writing(path):
        try:
            partial.mkdir(parents=True)
            writers = []
            for name, array in arrays.items():
                writers.append(BlockWriter(partial / name, _BLOCK_BYTES))
                writers[-1].write(array)
            commit_folder(partial, kind, writers, {"report": report})
            if not path.exists():
                _publish(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, path: Path) -> None:
    try:
        os.rename(partial, path)
    except OSError:
        if not path.exists():  # else another process was first, with the same content
            raise


def _cut(store: TokenStore, context: int, too_long: str) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Starts and lengths of the pieces that are placed, in the store's order, and what became of the documents."""
    offsets = store.offsets_at(np.arange(store.num_documents + 1))
    starts, lengths = offsets[:-1], np.diff(offsets)
    if not len(lengths) or lengths.max() < 1:
        raise DataError(f"{store.path}: holds no tokens; add documents")
    if lengths.min() < 0:
        raise DataError(f"{store.path}: document offsets do not increase; the index of the file is damaged")
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    long = lengths > context
    report = {"documents": store.num_documents, "tokens_in": store.num_tokens, "dropped_tokens": 0}
    if too_long == "refuse" and long.any():
        document = int(np.flatnonzero(np.diff(offsets) > context)[0])
        tokens = offsets[document + 1] - offsets[document]
        raise DataError(
            f"{store.path}: document {document} has {tokens} tokens, more than a row "
            f'of {context} ({long.sum()} such documents); raise context or set too_long to "truncate" or "split"'
        )
    if too_long == "truncate":
        report |= {"truncated_documents": int(long.sum()), "dropped_tokens": int((lengths[long] - context).sum())}
        lengths = np.minimum(lengths, context)
    elif too_long == "split":
        report["split_documents"] = int(long.sum())
        pieces = np.where(long, -(-(lengths - 1) // context), 1)
        document, piece = np.repeat(np.arange(len(lengths)), pieces), ragged(np.zeros_like(pieces), pieces)
        starts = starts[document] + piece * context
        lengths = np.minimum(lengths[document] - piece * context, context + 1)
    report["tokens_out"] = report["tokens_in"] - report["dropped_tokens"]
    return starts, lengths, report


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Put items of `lengths` (1 to capacity) into bins: in order of falling length (ties: first come), each into the
    bin with the least room that still holds it, else into a new one. Returns (bin of each item, number of bins).

    All items of a length go through at once: bins are kept by the room they have left, so the work is about
    O(items + capacity * log(capacity)) numpy operations rather than a Python step an item.
    """
    order = np.argsort(-lengths, kind="stable")
    cuts = np.flatnonzero(np.diff(lengths[order])) + 1
    bin_of = np.empty(len(lengths), dtype=np.int64)
    num_bins = 0
    by_room: dict[int, np.ndarray] = {}
    rooms: list[int] = []  # the keys of by_room, rising

    def put_back(bins: np.ndarray, room: int) -> None:
        if room and len(bins):
            if room in by_room:
                bins = np.concatenate([by_room[room], bins])
            else:
                bisect.insort(rooms, room)
            by_room[room] = bins

    for items in np.split(order, cuts) if len(order) else []:
        length = int(lengths[items[0]])
        while len(items):
            at = bisect.bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms.pop(at)
                bins = by_room.pop(room)
            else:
                room = capacity
                needed = -(-len(items) // (capacity // length))
                bins = np.arange(num_bins, num_bins + needed)
                num_bins += needed
            # A bin just used has the least room of those that fit, so it takes as many of this length as it can.
            each = room // length
            used = min(len(bins), -(-len(items) // each))
            placed = np.repeat(bins[:used], each)[: len(items)]
            bin_of[items[: len(placed)]] = placed
            last = len(placed) - (used - 1) * each
            put_back(bins[used:], room)
            put_back(bins[: used - 1], room - each * length)
            put_back(bins[used - 1 : used], room - last * length)
            items = items[len(placed) :]
    return bin_of, num_bins
