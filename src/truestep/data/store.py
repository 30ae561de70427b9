"""Token stores: all documents of a corpus as one memory-mapped run of ids, with a checksum for every block.

A folder of checked blocks (see blocks.py) with

    tokens.bin     ids, little-endian uint16 or uint32, one document after the other
    offsets.bin    int64, first token of every document, and the end of the last
    header.json    vocabulary, id type, sizes, checksums, and the builder's report

One rule for ends: every document in a store ends with the end-of-document id (`StoreWriter` adds it where it is
missing), so that a model learns to stop.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from truestep.data.blocks import BlockReader, FolderWriter, digest, open_folder
from truestep.errors import DataError
from truestep.files import canonical, writing

FORMAT = "truestep tokens 1"
TOKENS, OFFSETS = "tokens.bin", "offsets.bin"
_MERGE_TOKENS = 1 << 22


def id_type(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every id below `vocab_size`: 65,536 ids fit uint16, 65,537 do not."""
    if not 1 <= vocab_size <= 2**32:
        raise DataError(f"vocab_size {vocab_size} is outside 1 to 2**32; check the tokenizer")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class TokenStore:
    """Read access to a corpus of ids. Opening costs the same at any size; blocks are verified when first read.

    num_tokens, num_documents: sizes, end-of-document ids included. num_bytes: bytes of the source text.
    vocab_size, eod_id: as written. These three are None in a foreign file that does not say. fingerprint: changes with
    any token or border.
    """

    def __init__(
        self,
        path: Path,
        ids: np.ndarray,
        offsets: Callable[[np.ndarray], np.ndarray],
        num_documents: int,
        fingerprint: str,
        header: dict[str, Any],
        readers: tuple[BlockReader, ...] = (),
    ):
        self.path, self.fingerprint, self.header = path, fingerprint, header
        self.num_tokens, self.num_documents = len(ids), num_documents
        self.num_bytes: int | None = header.get("num_bytes")
        self.vocab_size: int | None = header.get("vocab_size")
        self.eod_id: int | None = header.get("eod_id")
        self._ids, self._offsets, self._readers = ids, offsets, readers

    @staticmethod
    def open(path: str | Path) -> "TokenStore":
        """Open a folder that StoreWriter finished; DataError if it is absent, unfinished, truncated or changed."""
        header, readers = open_folder(Path(path), FORMAT)
        return TokenStore.of(Path(path), header, readers)

    @staticmethod
    def of(folder: Path, header: dict[str, Any], readers: dict[str, BlockReader]) -> "TokenStore":
        """The tokens of an opened folder that has these two files, and perhaps others."""
        tokens, offsets = readers[TOKENS], readers[OFFSETS]
        starts = offsets.data.view("<i8")

        def offsets_at(documents: np.ndarray) -> np.ndarray:
            offsets.touch(documents * 8, documents * 8 + 8)
            return starts[documents]

        ids = tokens.data.view(header["id_type"])
        # Every token and border through the checksums; not the report, which may hold times and paths.
        fingerprint = digest(canonical({name: value for name, value in header.items() if name != "report"}))
        return TokenStore(folder, ids, offsets_at, len(starts) - 1, fingerprint, header, (tokens, offsets))

    def read(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """ids[starts[i] : starts[i] + lengths[i]] for every i (lengths > 0), concatenated, in the store's own type."""
        if not len(starts):
            return self._ids[:0]
        stops = starts + lengths
        if starts.min() < 0 or stops.max() > self.num_tokens:
            raise DataError(
                f"{self.path}: tokens up to {stops.max()} wanted of {self.num_tokens}; its offsets are damaged"
            )
        if self._readers:
            width = self._ids.itemsize
            self._readers[0].touch(starts * width, stops * width)
        ids = np.concatenate([self._ids[a:b] for a, b in zip(starts.tolist(), stops.tolist())])
        if not self._readers and self.vocab_size is not None and (ids.min() < 0 or ids.max() >= self.vocab_size):
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise DataError(
                f"{self.path}: holds id {bad}, outside a vocabulary of {self.vocab_size}; check the tokenizer"
            )
        return ids

    def offsets_at(self, documents: np.ndarray) -> np.ndarray:
        """First token of each document, int64; num_documents gives num_tokens."""
        return self._offsets(documents)

    def document_at(self, positions: np.ndarray) -> np.ndarray:
        """The document of each token position: the last that starts at or before it. O(log num_documents)."""
        low = np.zeros(len(positions), dtype=np.int64)
        width = self.num_documents
        while width > 1:  # bisection for all positions at once; touches, and so verifies, only the blocks on its way
            middle = low + width // 2
            low = np.where(self._offsets(middle) <= positions, middle, low)
            width -= width // 2
        return low

    def document(self, index: int) -> np.ndarray:
        """Ids of one document, its end-of-document id included."""
        start, stop = self.offsets_at(np.array([index, index + 1])).tolist()
        return self.read(np.array([start]), np.array([stop - start])) if stop > start else self._ids[:0]

    def verify(self) -> None:
        """Hash every block. A foreign file has no checksums: nothing can be said of it, and nothing is."""
        for reader in self._readers:
            reader.verify()


class StoreWriter:
    """Writes a store. Memory does not grow with the data (but for 8 bytes a block). As a context manager, leaving it
    without `finish`, by an error or not, removes what was written."""

    def __init__(self, path: str | Path, vocab_size: int, eod_id: int, *, block_bytes: int = 1 << 20):
        """`eod_id` ends every document. Raises if the folder already holds a store or cannot be written."""
        self.path, self.vocab_size, self.eod_id, self.block_bytes = Path(path), vocab_size, eod_id, block_bytes
        self._type = id_type(vocab_size)
        if not 0 <= eod_id < vocab_size:
            raise DataError(f"{path}: end-of-document id {eod_id} is outside a vocabulary of {vocab_size}")
        self.num_documents = self.num_tokens = self.num_bytes = 0
        self._folder = FolderWriter(self.path, FORMAT, "a token store", (TOKENS, OFFSETS), block_bytes)
        with writing(self.path):
            self._folder.write(OFFSETS, np.zeros(1, dtype="<i8"))

    def append(self, ids: np.ndarray, num_bytes: int) -> None:
        """Add one document: 1-D integers, not empty; `num_bytes` is the size of its text in UTF-8."""
        self.append_many([ids], num_bytes)

    def append_many(self, documents: Sequence[np.ndarray], num_bytes: int) -> None:
        """Add documents in order; `num_bytes` is the size of their text together. If one is refused, none is added."""
        parts = [self._ended(ids, self.num_documents + i) for i, ids in enumerate(documents)]
        if parts:
            self._add(np.concatenate(parts), np.cumsum([len(part) for part in parts]), num_bytes)

    def append_store(self, store: TokenStore) -> None:
        """Add all documents of another store of the same vocabulary, verified as they are copied."""
        if (store.vocab_size, store.eod_id) != (self.vocab_size, self.eod_id) or store.num_bytes is None:
            raise DataError(
                f"{store.path}: vocabulary {store.vocab_size} with end-of-document id {store.eod_id} cannot be merged "
                f"into {self.path} with {self.vocab_size} and {self.eod_id}; build it with the same tokenizer"
            )
        base = self.num_tokens
        with writing(self.path):
            for start in range(0, store.num_tokens, _MERGE_TOKENS):
                length = min(_MERGE_TOKENS, store.num_tokens - start)
                self._folder.write(TOKENS, store.read(np.array([start]), np.array([length])))
            for first in range(1, store.num_documents + 1, _MERGE_TOKENS):
                documents = np.arange(first, min(first + _MERGE_TOKENS, store.num_documents + 1))
                self._folder.write(OFFSETS, (store.offsets_at(documents) + base).astype("<i8"))
        self.num_tokens += store.num_tokens
        self.num_documents += store.num_documents
        self.num_bytes += store.num_bytes

    def finish(self, report: dict[str, Any]) -> TokenStore:
        """Bring all to the disk, publish the header with the builder's `report` (JSON values), open the store."""
        header = {
            "vocab_size": self.vocab_size,
            "eod_id": self.eod_id,
            "id_type": self._type.str,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "num_bytes": self.num_bytes,
            "report": report,
        }
        with writing(self.path):
            self._folder.commit(header)
        return TokenStore.open(self.path)

    def abort(self) -> None:
        """Remove what was written so far."""
        self._folder.abort()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.__exit__(*error)

    def _ended(self, ids: np.ndarray, document: int) -> np.ndarray:
        if ids.dtype.kind not in "iu" or ids.ndim != 1 or not len(ids):
            raise DataError(
                f"{self.path}: document {document} has type {ids.dtype} and shape {ids.shape}; "
                "give 1-D integers, and drop (and count) empty documents"
            )
        return ids.astype(np.int64) if ids[-1] == self.eod_id else np.append(ids.astype(np.int64), self.eod_id)

    def _add(self, ids: np.ndarray, ends: np.ndarray, num_bytes: int) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            where = int(np.searchsorted(ends, np.flatnonzero(ids == bad)[0], side="right"))
            raise DataError(
                f"{self.path}: id {bad} in document {self.num_documents + where} is outside a vocabulary of "
                f"{self.vocab_size}; use the tokenizer that the store was declared with"
            )
        with writing(self.path):
            self._folder.write(TOKENS, ids.astype(self._type))
            self._folder.write(OFFSETS, (ends + self.num_tokens).astype("<i8"))
        self.num_tokens += len(ids)
        self.num_documents += len(ends)
        self.num_bytes += num_bytes
