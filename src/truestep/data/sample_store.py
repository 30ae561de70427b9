"""Sample stores: the rows of a corpus as units of samples, memory-mapped, with a checksum for every block.

A folder of checked blocks (see blocks.py) with

    tokens.bin     ids, little-endian uint16 or uint32, one sample after the other
    roles.bin      uint8, one a token
    offsets.bin    int64, first token of every sample, and the end of the last
    units.bin      int64, first sample of every unit, and the end
    rows.bin       int64, first unit of every row of the source, and the end
    sides.bin      int8, one a sample
    values.bin     float32, one a sample, or one a token where the header says so
    header.json    vocabulary, id type, sizes, checksums, and the builder's report

What ends a sample is up to whoever rendered it: nothing is added here.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from truestep.data.blocks import BlockReader, FolderWriter, open_folder, ranges, read_format, taken
from truestep.data.samples import Sample, Unit
from truestep.data.store import OFFSETS, TOKENS, TokenStore, id_type
from truestep.errors import DataError
from truestep.files import writing

FORMAT = "truestep samples 1"
ROLES, UNITS, ROWS, SIDES, VALUES = "roles.bin", "units.bin", "rows.bin", "sides.bin", "values.bin"
_MERGE = 1 << 20
_TYPES = {ROLES: "u1", OFFSETS: "<i8", UNITS: "<i8", ROWS: "<i8", SIDES: "i1", VALUES: "<f4"}
_BORDERS = (OFFSETS, UNITS, ROWS)


class SampleStore:
    """Read access to a corpus of samples. Opening costs the same at any size; blocks are verified when first read.

    `samples` are the ids, each sample a document. A document of the store itself is a row of the source: one or more
    units. num_bytes: of the rows' text. fingerprint: changes with anything that is stored."""

    def __init__(self, path: Path, header: dict[str, Any], readers: dict[str, BlockReader]):
        self.path, self.header, self._readers = path, header, readers
        self.samples = TokenStore.of(path, header, readers)
        self.fingerprint, self.num_tokens = self.samples.fingerprint, self.samples.num_tokens
        self.num_samples = self.samples.num_documents
        self.num_units, self.num_documents = (len(readers[name].data) // 8 - 1 for name in (UNITS, ROWS))
        self.num_bytes: int = header["num_bytes"]
        self.vocab_size: int = header["vocab_size"]
        self.eod_id: int = header["eod_id"]
        self.values_by_token: bool = header["values_by_token"]

    @staticmethod
    def open(path: str | Path) -> "SampleStore":
        """Open a folder that SampleWriter finished; DataError if it is absent, unfinished, truncated or changed."""
        header, readers = open_folder(Path(path), FORMAT)
        return SampleStore(Path(path), header, readers)

    def roles(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """uint8: roles of tokens [starts[i], starts[i] + lengths[i]) for every i, concatenated."""
        return ranges(self._readers[ROLES], "u1", starts, lengths)

    def units_at(self, units: np.ndarray) -> np.ndarray:
        """First sample of each unit, int64; num_units gives num_samples."""
        return taken(self._readers[UNITS], "<i8", units)

    def rows_at(self, rows: np.ndarray) -> np.ndarray:
        """First unit of each row of the source, int64; num_documents gives num_units."""
        return taken(self._readers[ROWS], "<i8", rows)

    def sides(self, samples: np.ndarray) -> np.ndarray:
        """int8, one a sample."""
        return taken(self._readers[SIDES], "i1", samples)

    def values(self, samples: np.ndarray) -> np.ndarray:
        """float32, one a sample; only where values are not told by token."""
        return taken(self._readers[VALUES], "<f4", samples)

    def token_values(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """float32, one a token, concatenated; only where values are told by token."""
        return ranges(self._readers[VALUES], "<f4", starts, lengths)

    def document(self, index: int) -> list[Unit]:
        """The units of one row of the source."""
        first, last = self.rows_at(np.array([index, index + 1])).tolist()
        borders = self.units_at(np.arange(first, last + 1)).tolist()
        return [[self.sample(number) for number in range(a, b)] for a, b in pairwise(borders)]

    def sample(self, number: int) -> Sample:
        """One sample of the store."""
        start, stop = self.samples.offsets_at(np.array([number, number + 1]))
        span, at = (np.array([start]), np.array([stop - start])), np.array([number])
        value = self.token_values(*span) if self.values_by_token else float(self.values(at)[0])
        return Sample(self.samples.read(*span), self.roles(*span), int(self.sides(at)[0]), value)

    def verify(self) -> None:
        """Hash every block."""
        for reader in self._readers.values():
            reader.verify()


Store = TokenStore | SampleStore


def open_store(path: str | Path) -> Store:
    """The store of tokens or of samples in a folder."""
    return SampleStore.open(path) if read_format(Path(path)) == FORMAT else TokenStore.open(path)


class SampleWriter:
    """Writes a store of samples. As a context manager, leaving it without `finish` removes what was written."""

    def __init__(
        self, path: str | Path, vocab_size: int, eod_id: int, *, by_token: bool = False, block_bytes: int = 1 << 20
    ):
        """`by_token`: values are one a token, else one a sample. Raises if the folder already holds a store or cannot
        be written."""
        self.path, self.vocab_size, self.eod_id, self._by_token = Path(path), vocab_size, eod_id, by_token
        self._types = {TOKENS: id_type(vocab_size)} | {name: np.dtype(kind) for name, kind in _TYPES.items()}
        self._folder = FolderWriter(self.path, FORMAT, "a sample store", tuple(self._types), block_bytes)
        self.num_documents = self.num_units = self.num_samples = self.num_tokens = self.num_bytes = 0
        with writing(self.path):
            for name in _BORDERS:
                self._write(name, np.zeros(1))

    def append(self, units: list[Unit], num_bytes: int) -> None:
        """Add one row of the source; `num_bytes` is the size of its text in UTF-8."""
        self.append_many([units], num_bytes)

    def append_many(self, documents: Sequence[list[Unit]], num_bytes: int) -> None:
        """Add rows in order; `num_bytes` is the size of their text together. If one is refused, none is added."""
        units = [unit for document in documents for unit in document]
        samples = [sample for unit in units for sample in unit]
        self._check(documents, samples)
        if not documents:
            return
        values = [self._values(sample) for sample in samples]
        columns = {
            TOKENS: np.concatenate([sample.ids for sample in samples]),
            ROLES: np.concatenate([sample.roles for sample in samples]),
            OFFSETS: self.num_tokens + np.cumsum([len(sample.ids) for sample in samples]),
            UNITS: self.num_samples + np.cumsum([len(unit) for unit in units]),
            ROWS: self.num_units + np.cumsum([len(document) for document in documents]),
            SIDES: np.array([sample.side for sample in samples]),
            VALUES: np.concatenate(values),
        }
        with writing(self.path):
            for name, column in columns.items():
                self._write(name, column)
        self._count(len(documents), len(units), len(samples), len(columns[TOKENS]), num_bytes)

    def append_store(self, store: SampleStore) -> None:
        """Add all rows of another store of the same vocabulary, verified as they are copied."""
        if (store.vocab_size, store.eod_id, store.values_by_token) != (self.vocab_size, self.eod_id, self._by_token):
            raise DataError(
                f"{store.path}: vocabulary {store.vocab_size} with end-of-document id {store.eod_id} cannot be merged "
                f"into {self.path} with {self.vocab_size} and {self.eod_id}; build it with the same tokenizer"
            )
        with writing(self.path):
            for start in range(0, store.num_tokens, _MERGE):
                span = np.array([start]), np.array([min(_MERGE, store.num_tokens - start)])
                self._write(TOKENS, store.samples.read(*span))
                self._write(ROLES, store.roles(*span))
                if self._by_token:
                    self._write(VALUES, store.token_values(*span))
            for samples in _pieces(store.num_samples):
                self._write(OFFSETS, store.samples.offsets_at(samples + 1) + self.num_tokens)
                self._write(SIDES, store.sides(samples))
                if not self._by_token:
                    self._write(VALUES, store.values(samples))
            for units in _pieces(store.num_units):
                self._write(UNITS, store.units_at(units + 1) + self.num_samples)
            for rows in _pieces(store.num_documents):
                self._write(ROWS, store.rows_at(rows + 1) + self.num_units)
        self._count(store.num_documents, store.num_units, store.num_samples, store.num_tokens, store.num_bytes)

    def finish(self, report: dict[str, Any]) -> SampleStore:
        """Bring all to the disk, publish the header with the builder's `report` (JSON values), open the store."""
        header = {
            "vocab_size": self.vocab_size,
            "eod_id": self.eod_id,
            "id_type": self._types[TOKENS].str,
            "values_by_token": self._by_token,
            "num_tokens": self.num_tokens,
            "num_samples": self.num_samples,
            "num_units": self.num_units,
            "num_documents": self.num_documents,
            "num_bytes": self.num_bytes,
            "report": report,
        }
        with writing(self.path):
            self._folder.commit(header)
        return SampleStore.open(self.path)

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.__exit__(*error)

    def _write(self, name: str, column: np.ndarray) -> None:
        self._folder.write(name, column.astype(self._types[name]))

    def _count(self, documents: int, units: int, samples: int, tokens: int, num_bytes: int) -> None:
        self.num_documents += documents
        self.num_units += units
        self.num_samples += samples
        self.num_tokens += tokens
        self.num_bytes += num_bytes

    def _values(self, sample: Sample) -> np.ndarray:
        return np.atleast_1d(np.asarray(sample.value, dtype=np.float32))

    def _check(self, documents: Sequence[list[Unit]], samples: list[Sample]) -> None:
        if not all(document and all(document) for document in documents):
            raise DataError(f"{self.path}: a row or a unit has no sample; drop (and count) empty rows")
        for sample in samples:
            ids, shape = sample.ids, sample.ids.shape
            if ids.dtype.kind not in "iu" or ids.ndim != 1 or sample.roles.shape != shape or not len(ids):
                raise DataError(
                    f"{self.path}: a sample has ids of type {ids.dtype} and shape {shape} and roles of shape "
                    f"{sample.roles.shape}; give 1-D integers, and one role for each"
                )
            if np.shape(sample.value) != (shape if self._by_token else ()):
                each = "one number for each id" if self._by_token else "one number"
                raise DataError(f"{self.path}: a sample has values of shape {np.shape(sample.value)}; give {each}")
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                bad = low if low < 0 else high
                raise DataError(
                    f"{self.path}: id {bad} of a sample is outside a vocabulary of {self.vocab_size}; use the "
                    f"tokenizer that the store was declared with"
                )


def _pieces(count: int) -> list[np.ndarray]:
    return [np.arange(first, min(first + _MERGE, count)) for first in range(0, count, _MERGE)]
