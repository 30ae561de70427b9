"""One shard of a source becomes a small token store of its own, with what the merge needs to know of each document."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from truestep.data.blocks import canonical, digest, writing
from truestep.data.decontaminate import EvaluationRuns
from truestep.data.dedup import NUM_HASHES, shingles, signature
from truestep.data.sources.base import Document, Shard
from truestep.data.store import StoreWriter, TokenStore
from truestep.data.tokenizer import Tokenizer, load_tokenizer
from truestep.errors import DataError

_BATCH_BYTES = 2**20
_DOCUMENT = np.dtype([("hash", "<u8", 2), ("num_bytes", "<i8"), ("bytes_by_ids", "<i8")])


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
class Job:
    """What is done to every shard. `split` and `holdout` as in the data section; `runs` is a file with the evaluation
    texts' runs of `ngram` words; `near` asks for what the search for near-duplicates needs."""

    folder: Path
    tokenizer: Path
    fingerprint: str
    split: str
    holdout: float
    runs: Path | None
    runs_digest: str
    ngram: int
    near: bool

    def key(self, shard: Shard) -> str:
        """Changes with everything that decides the shard's tokens."""
        job = [self.fingerprint, self.split, self.holdout, self.runs_digest, self.ngram, self.near]
        return digest(canonical([1, *job, shard.name, shard.stamp]))


@dataclass(frozen=True)
class Part:
    """A finished shard."""

    folder: Path
    store: TokenStore
    documents: np.ndarray  # _DOCUMENT for each document of the store
    counts: dict[str, Amount]

    def signatures(self) -> np.ndarray:
        return np.load(self.folder / "signatures.npy", mmap_mode="r")

    def shingle_sets(self) -> list[np.ndarray]:
        ends = np.load(self.folder / "shingle_ends.npy").tolist()
        values = np.load(self.folder / "shingles.npy", mmap_mode="r")
        return [values[start:end] for start, end in zip([0, *ends], ends)]


@dataclass
class _Gathered:
    """Of the documents that go into the shard's store."""

    documents: list[Any] = field(default_factory=list)
    signatures: list[np.ndarray] = field(default_factory=list)
    shingles: list[np.ndarray] = field(default_factory=list)

    def arrays(self, near: bool) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {"documents": np.array(self.documents, dtype=_DOCUMENT)}
        if near:
            arrays["signatures"] = np.array(self.signatures, dtype=np.uint32).reshape(-1, NUM_HASHES)
            arrays["shingles"] = np.concatenate([np.empty(0, np.uint64), *self.shingles])
            arrays["shingle_ends"] = np.cumsum([len(s) for s in self.shingles], dtype=np.int64)
        return arrays


def in_split(text_hash: int, split: str, holdout: float) -> bool:
    """A document is held out by its 128-bit hash alone: the same text always falls on the same side."""
    if split == "all":
        return True
    held_out = text_hash / 2**128 < holdout
    return held_out == (split == "heldout")


def text_hash(data: bytes) -> int:
    """128 bits of xxh3."""
    return xxhash.xxh3_128_intdigest(data)


def finished(job: Job, number: int, shard: Shard) -> Part | None:
    """The shard as an earlier run left it, verified; None if it is absent, damaged or of other inputs."""
    folder = job.folder / f"{number:06d}"
    if not folder.exists():
        return None
    try:
        part = _open(folder)
        part.store.verify()
    except DataError:  # damaged: it is only an intermediate result, so do it again
        return None
    return part if part.store.header["report"]["key"] == job.key(shard) else None


def do_shard(task: tuple[Job, int, Shard]) -> int:
    """Tokenise a shard into its folder (published whole, by a rename) and return its number."""
    job, number, shard = task
    folder = job.folder / f"{number:06d}"
    partial = job.folder / f"{folder.name}.{os.getpid()}.partial"
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
    try:
        _write(job, shard, partial)
        with writing(folder):
            os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return number


def _write(job: Job, shard: Shard, folder: Path) -> None:
    tokenizer, runs = _tokenizer(job.tokenizer, job.fingerprint), _runs(job.runs, job.runs_digest, job.ngram)
    counts = {name: Amount() for name in ("in", "other_split", "empty", "contaminated")}
    gathered = _Gathered()
    with StoreWriter(folder, tokenizer.vocab_size, tokenizer.eod_id) as writer:
        for batch in _batches(_selected(shard.documents(), job, tokenizer.byte_lengths(), counts)):
            for encoded in _encoded(batch, tokenizer):
                _place(encoded, writer, counts, gathered, runs, job.near)
        arrays = gathered.arrays(job.near)
        for name, array in arrays.items():
            with writing(folder), open(folder / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        digests = {name: digest(array.tobytes()) for name, array in arrays.items()}
        report = {"key": job.key(shard), "arrays": digests, "counts": {k: asdict(v) for k, v in counts.items()}}
        writer.finish(report)


@dataclass(frozen=True)
class _Selected:
    document: Document
    hash: int
    num_bytes: int


@dataclass(frozen=True)
class _Encoded(_Selected):
    bytes_by_ids: int
    ids: np.ndarray


def _selected(
    documents: Iterable[Document], job: Job, byte_lengths: np.ndarray, counts: dict[str, Amount]
) -> Iterator[_Selected]:
    """The documents of the split that are not empty."""
    for document in documents:
        if document.ids is None:
            data = _utf8(document)
            size = len(data)
        elif job.near or job.runs is not None:
            raise DataError(
                f"{document.origin}: is tokenised already, so dedup = 'near' and decontaminate cannot read its words; "
                f"take them out (dedup = 'exact' works)."
            )
        else:
            data = np.ascontiguousarray(document.ids, dtype="<u4").tobytes()
            size = int(byte_lengths[_checked(document, len(byte_lengths))].sum())
        selected = _Selected(document, text_hash(data), size)
        counts["in"].add(1, size, 0)
        if not data:
            counts["empty"].add(1, 0, 0)
        elif not in_split(selected.hash, job.split, job.holdout):
            counts["other_split"].add(1, size, 0)
        else:
            yield selected


def _utf8(document: Document) -> bytes:
    try:
        return (document.text or "").encode()
    except UnicodeEncodeError as error:
        bad = f"U+{ord(error.object[error.start]):04X}"
        raise DataError(f"{document.origin}: character {error.start} is {bad}, half of a pair; repair it.") from None


def _batches(documents: Iterable[_Selected]) -> Iterator[list[_Selected]]:
    batch, size = [], 0
    for item in documents:
        batch.append(item)
        size += item.num_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(batch: list[_Selected], tokenizer: Tokenizer) -> Iterator[_Encoded]:
    texts = [item.document.text for item in batch if item.document.text is not None]
    try:
        ids_of_texts = iter(tokenizer.encode_batch(texts))
    except DataError as error:
        raise DataError(f"{batch[0].document.origin} to {batch[-1].document.origin}: {error}") from error
    lengths = tokenizer.byte_lengths()
    for item in batch:
        given = item.document.ids
        ids = next(ids_of_texts) if given is None else given.astype(np.int64)
        yield _Encoded(item.document, item.hash, item.num_bytes, int(lengths[ids].sum()), ids)


def _checked(document: Document, vocab_size: int) -> np.ndarray:
    ids = np.asarray(document.ids)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(
            f"{document.origin}: holds id {bad}, outside the tokenizer's vocabulary of {vocab_size}; name the "
            f"tokenizer that the ids were made with."
        )
    return ids


def _place(
    encoded: _Encoded,
    writer: StoreWriter,
    counts: dict[str, Amount],
    gathered: _Gathered,
    runs: EvaluationRuns | None,
    near: bool,
) -> None:
    text, ids = encoded.document.text or "", encoded.ids
    num_tokens = len(ids) + (not len(ids) or int(ids[-1]) != writer.eod_id)
    counts["in"].add(0, 0, num_tokens)
    if not len(ids):  # a normalizer may leave nothing of a text
        counts["empty"].add(1, encoded.num_bytes, num_tokens)
    elif runs is not None and runs.touch(text):
        counts["contaminated"].add(1, encoded.num_bytes, num_tokens)
    else:
        writer.append(ids, encoded.num_bytes)
        halves = encoded.hash >> 64, encoded.hash & (2**64 - 1)
        gathered.documents.append((halves, encoded.num_bytes, encoded.bytes_by_ids))
        if near:
            gathered.shingles.append(shingles(text))
            gathered.signatures.append(signature(gathered.shingles[-1]))


def _open(folder: Path) -> Part:
    store = TokenStore.open(folder)
    report = store.header["report"]
    for name, expected in report["arrays"].items():
        array = _load(folder / f"{name}.npy")
        if digest(array.tobytes()) != expected:
            raise DataError(f"{folder / name}.npy: was changed or damaged; build the data again.")
    counts = {reason: Amount(**amount) for reason, amount in report["counts"].items()}
    return Part(folder, store, _load(folder / "documents.npy"), counts)


def open_part(job: Job, number: int) -> Part:
    """A shard that this run finished."""
    return _open(job.folder / f"{number:06d}")


def _load(path: Path) -> np.ndarray:
    with contextlib.suppress(OSError, ValueError):
        return np.load(path, allow_pickle=False)
    raise DataError(f"{path}: is missing or damaged; build the data again.")


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, fingerprint: str) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise RuntimeError(f"the tokenizer in {folder} is not the one that was saved there")
    return tokenizer


@lru_cache(maxsize=1)
def _runs(path: Path | None, _digest: str, n: int) -> EvaluationRuns | None:
    return None if path is None else EvaluationRuns(np.load(path, mmap_mode="r", allow_pickle=False), n)
