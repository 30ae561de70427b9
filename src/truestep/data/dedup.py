"""Which documents are copies of earlier ones. Both answers depend on the order of documents alone.

exact: equal 128-bit hashes (xxh3) of the text.

near: Jaccard similarity of the sets of word 5-grams at or above a threshold. Candidates come from MinHash (Broder 1997)
with 128 hash functions and banding (locality-sensitive hashing; Leskovec et al., Mining of Massive Datasets, 3.4); each
candidate pair is then decided by the exact Jaccard similarity of the two sets, so a false candidate drops nothing. A
pair exactly at the threshold is missed with a probability of at most 1 % (rows per band are chosen so).
"""

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from truestep.data.ngrams import mixed, ngram_hashes, word_hashes

SHINGLE_WORDS = 5
NUM_HASHES = 128
_MAX_MISS = 0.01
_MULTIPLIERS = mixed(np.arange(1, NUM_HASHES + 1, dtype=np.uint64)) | np.uint64(1)
_CHUNK = 4096


def exact_copies(hashes: np.ndarray) -> np.ndarray:
    """bool [n]: True for every row of `hashes` (uint64 [n, 2]) that an earlier row equals."""
    copies = np.ones(len(hashes), dtype=bool)
    pairs = np.ascontiguousarray(hashes).view([("a", np.uint64), ("b", np.uint64)]).ravel()
    copies[np.unique(pairs, return_index=True)[1]] = False
    return copies


def shingles(text: str) -> np.ndarray:
    """uint64, sorted and distinct: the word 5-grams of a text; a shorter text is one shingle."""
    words = word_hashes(text)
    return np.unique(ngram_hashes(words, min(SHINGLE_WORDS, max(1, len(words)))))


def signature(shingle_set: np.ndarray) -> np.ndarray:
    """uint32 [128]: the smallest value of each hash function over the set (not empty); multiply-shift hashing."""
    smallest = np.full(NUM_HASHES, 2**32 - 1, dtype=np.uint32)
    for start in range(0, len(shingle_set), _CHUNK):
        values = (shingle_set[start : start + _CHUNK, None] * _MULTIPLIERS) >> np.uint64(32)
        smallest = np.minimum(smallest, values.min(axis=0).astype(np.uint32))
    return smallest


def rows_per_band(threshold: float) -> int:
    """The longest bands that still miss a pair at the threshold at most once in a hundred."""
    rows = [r for r in range(1, NUM_HASHES + 1) if (1 - threshold**r) ** (NUM_HASHES // r) <= _MAX_MISS]
    return max(rows, default=1)


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Exact similarity of two sorted sets, not both empty."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared)


def near_copies(
    signatures: np.ndarray, shingles_of: Callable[[int], np.ndarray], alive: np.ndarray, threshold: float
) -> np.ndarray:
    """bool [n]: True for a document that resembles an earlier one which is itself kept. `signatures` uint32 [n, 128];
    `shingles_of` gives the set of a document; those that are not `alive` (all others have a set that is not empty)
    neither drop others nor are dropped."""
    rows = rows_per_band(threshold)
    bands: list[dict[bytes, list[int]]] = [defaultdict(list) for _ in range(NUM_HASHES // rows)]
    copies = np.zeros(len(signatures), dtype=bool)
    for document in np.flatnonzero(alive).tolist():
        keys = [signatures[document, b * rows : (b + 1) * rows].tobytes() for b in range(len(bands))]
        candidates = {earlier for band, key in zip(bands, keys) for earlier in band.get(key, ())}
        mine = shingles_of(document) if candidates else None
        if mine is not None and any(jaccard(mine, shingles_of(c)) >= threshold for c in sorted(candidates)):
            copies[document] = True
            continue
        for band, key in zip(bands, keys):
            band[key].append(document)
    return copies
