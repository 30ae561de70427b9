"""Stored columns: numbers that were made once for the tokens of a store, such as the log-probabilities of a reference.

A folder of checked blocks (see blocks.py) with

    values.bin     one value, or `shape` values, for each token of the store, in the store's order
    header.json    name, key, type, shape, sizes, checksums, and the maker's report

What belongs to a place of a row lies at the token that the place holds.
"""

import uuid
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from truestep.data.blocks import BlockReader, BlockWriter, commit_folder, digest, open_folder, ragged, ranges
from truestep.data.packing import Column, Packing, Pieces, Rows
from truestep.errors import DataError
from truestep.files import canonical, writing

FORMAT = "truestep column 1"
VALUES = "values.bin"
_BLOCK_BYTES = 1 << 20
_COPIED = 1 << 24


def column_key(**decides: Any) -> str:
    """A digest of all that decides a column's values (JSON): weights of the model, fingerprint of the store, ..."""
    return digest(canonical(decides))


class ColumnStore:
    """Read access to a column. `values` of a token have `column.shape`."""

    def __init__(self, path: Path, header: dict[str, Any], reader: BlockReader):
        self.path, self.header, self._reader = path, header, reader
        self.name: str = header["name"]
        self.key: str = header["key"]
        self.num_tokens: int = header["num_tokens"]
        self.column = Column(np.dtype(header["type"]), tuple(header["shape"]))

    @staticmethod
    def open(path: str | Path, key: str | None = None) -> "ColumnStore":
        """Open a folder that ColumnWriter finished; DataError if it is absent, unfinished, changed, or, where `key` is
        given, of another key."""
        header, readers = open_folder(Path(path), FORMAT)
        if key not in (None, header["key"]):
            raise DataError(
                f"{path}: was made with another model, other data or other settings (key {header['key']}, wanted "
                f"{key}); remove it, and it is made anew"
            )
        return ColumnStore(Path(path), header, readers[VALUES])

    def read(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Values of tokens [starts[i], starts[i] + lengths[i]) for every i, concatenated: (n, *shape)."""
        shape = self.column.shape
        flat = ranges(self._reader, self.column.dtype.str, starts, lengths, prod(shape))
        return flat.reshape(-1, *shape)

    def verify(self) -> None:
        """Hash every block."""
        self._reader.verify()


class ColumnWriter:
    """Writes a column, its tokens in any order; those that are never written stay 0. As a context manager, leaving it
    without `finish` removes what was written."""

    def __init__(self, path: str | Path, name: str, key: str, num_tokens: int, column: Column):
        self.path, self.name, self.key, self.num_tokens, self.column = Path(path), name, key, num_tokens, column
        self._scratch = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}.partial")
        self._written = 0
        self._type = column.dtype.newbyteorder("<")
        self._width = self._type.itemsize * prod(column.shape)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._scratch.open("w+b")
            self._file.truncate(num_tokens * self._width)

    def write(self, starts: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> None:
        """Values (n, *shape) of tokens [starts[i], starts[i] + lengths[i]) for every i, concatenated. DataError where
        one is not a number."""
        total = int(lengths.sum())
        if values.shape != (total, *self.column.shape):
            raise ValueError(f"{values.shape} values for {total} tokens of shape {self.column.shape}")
        if len(starts) and (starts.min() < 0 or (starts + lengths).max() > self.num_tokens):
            raise ValueError(f"{self.path}: has {self.num_tokens} tokens, others were written")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            finite = np.isfinite(values.reshape(total, -1)).all(axis=1)
            bad = int(ragged(starts, lengths)[np.flatnonzero(~finite)[0]])
            raise DataError(f"{self.path}: column {self.name!r} is not finite at token {bad}; check the model it is of")
        data = np.ascontiguousarray(values, self._type).reshape(-1).view(np.uint8)
        at = (np.cumsum(lengths) - lengths) * self._width
        with writing(self.path):
            for start, length, first in zip(starts.tolist(), lengths.tolist(), at.tolist()):
                self._file.seek(start * self._width)
                self._file.write(data[first : first + length * self._width].data)
        self._written += total

    def finish(self, report: dict[str, Any] | None = None) -> ColumnStore:
        """Bring all to the disk, publish the header, open the column."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            writer = BlockWriter(self.path / VALUES, _BLOCK_BYTES)
            self._file.seek(0)
            while data := self._file.read(_COPIED):
                writer.write(np.frombuffer(data, np.uint8))
            header = {
                "name": self.name,
                "key": self.key,
                "num_tokens": self.num_tokens,
                "num_written": self._written,
                "type": self._type.str,
                "shape": list(self.column.shape),
                "report": report or {},
            }
            commit_folder(self.path, FORMAT, [writer], header)
            self.abort()
        return ColumnStore.open(self.path)

    def abort(self) -> None:
        """Remove what is not published."""
        self._file.close()
        self._scratch.unlink(missing_ok=True)

    def __enter__(self) -> "ColumnWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()


class WithColumns:
    """A packing whose rows have stored columns as well."""

    def __init__(self, packing: Packing, stored: Sequence[ColumnStore], context: int):
        self._packing, self._stored, self._context = packing, tuple(stored), context
        self.num_rows, self.report = packing.num_rows, packing.report

    @property
    def columns(self) -> Mapping[str, Column]:
        return dict(self._packing.columns) | {one.name: one.column for one in self._stored}

    def pieces(self, indices: np.ndarray) -> Pieces:
        return self._packing.pieces(indices)

    def targets(self, indices: np.ndarray) -> int:
        return self._packing.targets(indices)

    def rows(self, indices: np.ndarray) -> Rows:
        rows, pieces = self._packing.rows(indices), self._packing.pieces(indices)
        places = pieces.places(self._context)
        for one in self._stored:
            values = np.zeros((len(indices) * self._context, *one.column.shape), one.column.dtype)
            values[places] = one.read(pieces.starts, pieces.lengths)
            rows.columns[one.name] = values.reshape(len(indices), self._context, *one.column.shape)
        return rows
