"""Parts: the finished shards of a build, each a store with what the merge has to know of every document."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from truestep.data.dedup import NUM_HASHES, shingles, signature
from truestep.data.sample_store import SampleWriter, Store, open_store
from truestep.data.store import StoreWriter
from truestep.data.tokenizer import Tokenizer
from truestep.errors import DataError
from truestep.files import writing
from truestep.recipe.data import DataSection

_NUMBERS = ("num_bytes", "bytes_by_ids", "num_tokens", "num_shingles")
DOCUMENT = np.dtype([("hash", "<u8", 2), *((name, "<i8") for name in _NUMBERS)])
_DOCUMENTS, _SIGNATURES, _SHINGLES = "documents.npy", "signatures.npy", "shingles.bin"
_READ_BYTES = 2**22
SENTENCES = 5
"""On refused rows, that are kept."""


@dataclass
class Amount:
    """So much text."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, documents: int, num_bytes: int, tokens: int) -> None:
        self.documents += documents
        self.bytes += num_bytes
        self.tokens += tokens


@dataclass(frozen=True)
class Refusals:
    """Sentences on the first rows that were refused, and how many were, by reason."""

    sentences: list[str]
    reasons: dict[str, int]

    def add(self, reason: str, sentence: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.sentences) < SENTENCES:
            self.sentences.append(sentence)


@dataclass(frozen=True)
class Part:
    """`documents` (DOCUMENT) has a row for each document of the store. Nothing stays open: there may be many parts."""

    folder: Path
    documents: np.ndarray
    counts: dict[str, Amount]
    refused: Refusals

    def store(self) -> Store:
        return open_store(self.folder)

    def signatures(self) -> np.ndarray:
        """uint32 [documents, 128], of a build that looks for near-duplicates."""
        return _load(self.folder / _SIGNATURES)

    def shingles(self, document: int) -> np.ndarray:
        """The shingle set of a document, of a build that looks for near-duplicates."""
        start, end = self._shingle_ends[document : document + 2].tolist()
        return np.fromfile(self.folder / _SHINGLES, np.uint64, end - start, offset=8 * start)

    @cached_property
    def _shingle_ends(self) -> np.ndarray:
        return np.append(0, np.cumsum(self.documents["num_shingles"]))


def writer_of(section: DataSection, folder: Path, tokenizer: Tokenizer) -> StoreWriter | SampleWriter:
    """What writes the store of a section: of tokens, or of samples."""
    if section.format == "text":
        return StoreWriter(folder, tokenizer.vocab_size, tokenizer.eod_id)
    return SampleWriter(folder, tokenizer.vocab_size, tokenizer.eod_id, by_token=section.format == "steps")


class PartWriter:
    """Writes a part around its store; a context manager that removes what it wrote unless `finish` was called."""

    def __init__(self, store: StoreWriter | SampleWriter, near: bool):
        self._store = store
        self._folder, self._near = store.path, near
        self._rows: list[tuple[tuple[int, int], int, int, int, int]] = []
        self._signatures: list[np.ndarray] = []
        with writing(self._folder):
            self._shingles = (self._folder / _SHINGLES).open("wb")
        self._shingles_hash = xxhash.xxh3_128()

    def append(self, content: Any, text: str, text_hash: int, num_bytes: int, bytes_by_ids: int) -> None:
        """Add a document: what the store takes, and `bytes_by_ids`, the size of the text that its ids stand for."""
        before = self._store.num_tokens
        self._store.append(content, num_bytes)
        halves = text_hash >> 64, text_hash & (2**64 - 1)
        found = shingles(text) if self._near else np.empty(0, np.uint64)
        self._rows.append((halves, num_bytes, bytes_by_ids, self._store.num_tokens - before, len(found)))
        if self._near:
            self._signatures.append(signature(found))
            self._shingles_hash.update(found.tobytes())
            with writing(self._folder):
                self._shingles.write(found.tobytes())

    def finish(self, key: str, counts: dict[str, Amount], refused: Refusals) -> None:
        """`key` stands for all that decided the part's content."""
        signatures = np.array(self._signatures, dtype=np.uint32).reshape(-1, NUM_HASHES)
        with writing(self._folder):
            self._shingles.flush()
            os.fsync(self._shingles.fileno())
            digests = {_SHINGLES: self._shingles_hash.hexdigest()}
            for name, array in ((_DOCUMENTS, np.array(self._rows, dtype=DOCUMENT)), (_SIGNATURES, signatures)):
                with open(self._folder / name, "wb") as file:
                    np.save(file, array, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
                digests[name] = _digest_of(self._folder / name)
        amounts = {reason: asdict(amount) for reason, amount in counts.items()}
        self._store.finish({"key": key, "digests": digests, "counts": amounts, "refused": asdict(refused)})

    def __enter__(self) -> "PartWriter":
        self._store.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._shingles.close()
        self._store.__exit__(*error)


def open_part(folder: Path) -> Part:
    """A part that this build finished. Its store verifies blocks as they are read."""
    report = open_store(folder).header["report"]
    counts = {reason: Amount(**amount) for reason, amount in report["counts"].items()}
    return Part(folder, _load(folder / _DOCUMENTS), counts, Refusals(**report["refused"]))


def is_good(folder: Path, key: str) -> bool:
    """Whether the folder holds a whole, undamaged part with this key. Reads all of it."""
    if not folder.exists():
        return False
    try:
        store = open_store(folder)
        store.verify()
        report = store.header["report"]
        return report["key"] == key and all(_digest_of(folder / n) == d for n, d in report["digests"].items())
    except (DataError, OSError):  # damaged: it is only an intermediate result, and is made again
        return False


def joined(parts: Sequence[Part]) -> np.ndarray:
    """The `documents` of all parts."""
    return np.concatenate([np.empty(0, dtype=DOCUMENT), *(part.documents for part in parts)])


def _digest_of(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); build the data again.") from error
