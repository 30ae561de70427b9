"""Hashes of runs of words, for decontamination and near-duplicate search.

Words are what white space leaves, case-folded, joined over line ends: a text broken into other lines has the same runs.
Each run of n words becomes one 64-bit number; two different runs share one with probability 2**-64.
"""

import numpy as np
import xxhash

_ODD = np.uint64(0x9E3779B97F4A7C15)


def word_hashes(text: str) -> np.ndarray:
    """uint64, one for each word of the text."""
    known: dict[str, int] = {}
    hashes = []
    for word in text.casefold().split():
        number = known.get(word)
        if number is None:
            number = known[word] = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
        hashes.append(number)
    return np.array(hashes, dtype=np.uint64)


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """uint64 [len(words) - n + 1], or empty: a hash of every n neighbouring words (order counts)."""
    count = len(words) - n + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    run = np.zeros(count, dtype=np.uint64)
    for i in range(n):
        run = mixed(run * _ODD + words[i : i + count])
    return run


def mixed(x: np.ndarray) -> np.ndarray:
    """Every input bit reaches every output bit (splitmix64's finaliser, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
