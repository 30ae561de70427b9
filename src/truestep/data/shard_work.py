"""One shard of a source becomes a small store of its own, with what the merge needs to know of each document."""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from truestep.data.blocks import digest
from truestep.data.decontaminate import EvaluationRuns
from truestep.data.parts import Amount, PartWriter, Refusals, is_good, writer_of
from truestep.data.samples import RowError, render, row_text
from truestep.data.sources.base import Document, Shard
from truestep.data.tokenizer import Tokenizer, load_tokenizer
from truestep.errors import DataError
from truestep.files import canonical, writing
from truestep.recipe.data import DataSection

_BATCH_BYTES = 2**20


@dataclass(frozen=True)
class Job:
    """What is done to every shard. `split` and `holdout` as in the data section; `runs` is a file with the evaluation
    texts' runs of `ngram` words; `near` asks for what the search for near-duplicates needs; `section` tells of rows."""

    folder: Path
    tokenizer: Path
    fingerprint: str
    split: str
    holdout: float
    runs: Path | None
    runs_digest: str
    ngram: int
    near: bool
    section: DataSection

    def part(self, number: int) -> Path:
        """Where the part of a shard lies."""
        return self.folder / f"{number:06d}"

    def key(self, shard: Shard) -> str:
        """Changes with everything that decides the shard's tokens."""
        job = [self.fingerprint, self.split, self.holdout, self.runs_digest, self.ngram, self.near]
        section = self.section
        rows = [section.format, section.fields, section.max_refused, section.as_chat, section.date]
        rows.append(section.template_values)
        return digest(canonical([2, *job, *rows, shard.name, shard.stamp]))


def in_split(text_hash: int, split: str, holdout: float) -> bool:
    """A document is held out by its 128-bit hash alone: the same text always falls on the same side."""
    if split == "all":
        return True
    held_out = text_hash / 2**128 < holdout
    return held_out == (split == "heldout")


def text_hash(data: bytes) -> int:
    """128 bits of xxh3."""
    return xxhash.xxh3_128_intdigest(data)


def is_finished(job: Job, number: int, shard: Shard) -> bool:
    """Whether an earlier run of the same build left this shard's part, whole and undamaged."""
    return is_good(job.part(number), job.key(shard))


def do_shard(task: tuple[Job, int, Shard]) -> int:
    """Tokenise a shard into its part (published whole, by a rename) and return its number."""
    job, number, shard = task
    folder = job.part(number)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
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
    refused = Refusals([], {})
    selected = _selected(shard.documents(), job, tokenizer.byte_lengths(), counts)
    if job.section.format == "text":
        made = (one for batch in _batches(selected) for one in _encoded(batch, tokenizer))
    else:
        counts["refused"] = Amount()
        made = _rendered(selected, job.section, tokenizer, counts["refused"], refused)
    store = writer_of(job.section, folder, tokenizer)
    with PartWriter(store, job.near) as writer:
        for encoded in made:
            reason = _reason_to_drop(encoded, runs)
            counts["in"].add(0, 0, encoded.num_tokens)
            if reason:
                counts[reason].add(1, encoded.num_bytes, encoded.num_tokens)
            else:
                writer.append(encoded.content, encoded.text, encoded.hash, encoded.num_bytes, encoded.bytes_by_ids)
        writer.finish(job.key(shard), counts, refused)


def _reason_to_drop(encoded: "_Encoded", runs: EvaluationRuns | None) -> str | None:
    if not len(encoded.content):  # a normalizer may leave nothing of a text
        return "empty"
    return "contaminated" if runs is not None and runs.touch(encoded.text) else None


@dataclass(frozen=True)
class _Selected:
    """`text`: what its words are looked for in; none of a document that is tokenised already."""

    document: Document
    text: str
    hash: int
    num_bytes: int


@dataclass(frozen=True)
class _Encoded(_Selected):
    """`content`: what the store takes, the ids of a document or the units of a row. `num_tokens` counts the
    end-of-document id, which a store of tokens adds where it is missing."""

    content: Any
    num_tokens: int
    bytes_by_ids: int


def _selected(
    documents: Iterable[Document], job: Job, byte_lengths: np.ndarray, counts: dict[str, Amount]
) -> Iterator[_Selected]:
    """The documents of the split that are not empty. Rows are looked at when they are rendered: one that seems empty
    may lack a field."""
    for document in documents:
        text, data, size = _looked_at(document, job, byte_lengths)
        selected = _Selected(document, text, text_hash(data), size)
        counts["in"].add(1, size, 0)
        if not data and document.row is None:
            counts["empty"].add(1, 0, 0)
        elif not in_split(selected.hash, job.split, job.holdout):
            counts["other_split"].add(1, size, 0)
        else:
            yield selected


def _looked_at(document: Document, job: Job, byte_lengths: np.ndarray) -> tuple[str, bytes, int]:
    """The text of a document, the bytes that it is told by, and its size."""
    if job.section.format != "text":
        if document.row is None:
            raise DataError(
                f'{document.origin}: is no row with fields, as format = "{job.section.format}" needs; use a source of '
                f'rows, or format = "text".'
            )
        text = row_text(document.row, job.section)
        data = _utf8(text, document.origin)
        return text, data, len(data)
    if document.ids is None:
        if not isinstance(document.text, str):
            problem = f"holds {document.text!r}, not text; repair it or drop it from the source."
            raise DataError(f"{document.origin}: {problem}")
        data = _utf8(document.text, document.origin)
        return document.text, data, len(data)
    if job.near or job.runs is not None:
        raise DataError(
            f"{document.origin}: is tokenised already, so dedup = 'near' and decontaminate cannot read its words; "
            f"take them out (dedup = 'exact' works)."
        )
    ids = _checked(document, len(byte_lengths))
    return "", np.ascontiguousarray(ids, dtype="<u4").tobytes(), int(byte_lengths[ids].sum())


def _utf8(text: str, origin: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        bad = f"U+{ord(error.object[error.start]):04X}"
        raise DataError(f"{origin}: character {error.start} is {bad}, half of a pair; repair it.") from None


def _rendered(
    rows: Iterable[_Selected], section: DataSection, tokenizer: Tokenizer, amount: Amount, refused: Refusals
) -> Iterator[_Encoded]:
    """The units of rows. What is wrong with one is raised where none may be refused, else counted and kept; what is
    wrong with the tokenizer is raised."""
    lengths = tokenizer.byte_lengths()
    for row in rows:
        try:
            units = render(row.document.row or {}, section, tokenizer)
        except RowError as error:
            sentence = f"{row.document.origin}: {error}"
            if not section.max_refused:
                raise DataError(sentence) from error
            amount.add(1, row.num_bytes, 0)
            refused.add(error.reason, sentence)
            continue
        ids = [sample.ids for unit in units for sample in unit]
        bytes_by_ids = sum(int(lengths[one].sum()) for one in ids)
        yield _Encoded(row.document, row.text, row.hash, row.num_bytes, units, sum(map(len, ids)), bytes_by_ids)


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
        num_tokens = len(ids) + (not len(ids) or int(ids[-1]) != tokenizer.eod_id)
        size = int(lengths[ids].sum())
        yield _Encoded(item.document, item.text, item.hash, item.num_bytes, ids, num_tokens, size)


def _checked(document: Document, vocab_size: int) -> np.ndarray:
    ids = np.asarray(document.ids)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(
            f"{document.origin}: holds id {bad}, outside the tokenizer's vocabulary of {vocab_size}; name the "
            f"tokenizer that the ids were made with."
        )
    return ids


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, fingerprint: str) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise RuntimeError(f"the tokenizer in {folder} is not the one that was saved there")
    return tokenizer


@lru_cache(maxsize=1)
def _runs(path: Path | None, _digest: str, n: int) -> EvaluationRuns | None:
    return None if path is None else EvaluationRuns(np.load(path, mmap_mode="r", allow_pickle=False), n)
