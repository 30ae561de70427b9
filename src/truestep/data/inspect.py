"""What is in a token store: sizes, what was dropped, how long documents are, which tokens are common, some text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from truestep.data.sample_store import SampleStore, Store, open_store
from truestep.data.store import TokenStore
from truestep.data.tokenizer import Tokenizer, load_tokenizer

_COUNTED_TOKENS = 2**24
_PIECE_TOKENS = 2**20
_LENGTH_DOCUMENTS = 2**20


@dataclass(frozen=True)
class Sample:
    """The beginning of a document."""

    document: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Inspection:
    """`lengths` holds (shortest, longest, documents) of tokens in powers of two; `common` (text, id, share of tokens).
    In a store of samples each of them counts as a document there. Of large stores, `num_counted` tokens in evenly
    spaced pieces and `num_measured` documents are looked at."""

    store: Store
    report: dict[str, Any]
    lengths: list[tuple[int, int, int]]
    median_length: int
    num_measured: int
    common: list[tuple[str, int, float]]
    num_counted: int
    samples: list[Sample]

    @property
    def bytes_per_token(self) -> float | None:
        """Of the source text, the end-of-document ids counted as tokens; None where the store does not say."""
        return None if self.store.num_bytes is None else self.store.num_bytes / self.store.num_tokens


def inspect_store(folder: str | Path, *, samples: int = 3, common: int = 20, characters: int = 300) -> Inspection:
    """Read a store that `data build` made, with the tokenizer beside it. DataError if it is none, or damaged."""
    store = open_store(folder)
    tokens = store.samples if isinstance(store, SampleStore) else store
    tokenizer = load_tokenizer(Path(folder) / "tokenizer")
    chosen = np.unique(np.linspace(0, tokens.num_documents - 1, min(samples, tokens.num_documents)).astype(np.int64))
    sizes = _lengths(tokens)
    counts, counted = _counts(tokens)
    most = np.argsort(-counts, kind="stable")[:common]
    return Inspection(
        store=store,
        report=store.header["report"],
        lengths=_powers_of_two(sizes),
        median_length=int(np.median(sizes)),
        num_measured=len(sizes),
        common=[(tokenizer.decode([i]), i, float(counts[i] / counted)) for i in most.tolist() if counts[i]],
        num_counted=counted,
        samples=[_sample(tokens, tokenizer, document, characters) for document in chosen.tolist()],
    )


def _lengths(store: TokenStore) -> np.ndarray:
    step = -(-store.num_documents // _LENGTH_DOCUMENTS)
    documents = np.arange(0, store.num_documents, step)
    return store.offsets_at(documents + 1) - store.offsets_at(documents)


def _powers_of_two(sizes: np.ndarray) -> list[tuple[int, int, int]]:
    bins = np.bincount(np.frexp(sizes.astype(np.float64))[1])
    return [(2 ** (b - 1), 2**b - 1, int(n)) for b, n in enumerate(bins.tolist()) if b >= np.flatnonzero(bins)[0]]


def _counts(store: TokenStore) -> tuple[np.ndarray, int]:
    """How often each id occurs, in the whole store or in evenly spaced pieces of it."""
    pieces = min(_COUNTED_TOKENS, store.num_tokens) // _PIECE_TOKENS + 1
    starts = np.linspace(0, max(0, store.num_tokens - _PIECE_TOKENS), pieces).astype(np.int64)
    counts = np.zeros(store.vocab_size or 0, dtype=np.int64)
    last = 0
    for start in starts.tolist():
        start = max(start, last)
        last = min(start + _PIECE_TOKENS, store.num_tokens)
        if last > start:
            counts += np.bincount(store.read(np.array([start]), np.array([last - start])), minlength=len(counts))
    return counts, int(counts.sum())


def _sample(store: TokenStore, tokenizer: Tokenizer, document: int, characters: int) -> Sample:
    start, stop = store.offsets_at(np.array([document, document + 1])).tolist()
    ids = store.read(np.array([start]), np.array([min(stop - start, 2 * characters)]))
    text = tokenizer.decode(ids)
    return Sample(document, stop - start, text if len(text) <= characters else text[:characters] + "…")
