"""The order of rows within an epoch: a permutation that needs no table, so any row is found at once at any size."""

import hashlib
import math
from typing import overload

import numpy as np

_ROUNDS = 8
_MIN_SIDE = 8  # a network over fewer values reaches too few of the possible orders
_U64 = np.uint64


class Permutation:
    """A keyed bijection of [0, n): `Permutation(n, seed, epoch)[i]` is the i-th row of that epoch.

    A Feistel network on pairs (value // b, value % b) of Z_a x Z_b, a and b the least numbers near sqrt(n) with
    a b >= n; a value outside [0, n) is sent through again until it falls inside (the generalised Feistel cipher and
    cycle walking of Black and Rogaway 2002), which happens to one value in sqrt(n) at most, or so. The order is a
    function of n, seed, epoch and stream only; `stream` tells apart corpora of one mixture.
    """

    def __init__(self, n: int, seed: int, epoch: int, stream: int = 0):
        if not 0 < n <= 2**62:
            raise ValueError(f"cannot order {n} rows")
        self.n = n
        side = max(math.isqrt(n - 1) + 1, _MIN_SIDE)
        self._low, self._high = _U64(side), _U64(max(-(-n // side), _MIN_SIDE))
        key = f"truestep order {seed} {epoch} {stream}".encode()
        self._keys = np.frombuffer(hashlib.shake_256(key).digest(8 * _ROUNDS), dtype="<u8")

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, indices: int) -> int: ...
    @overload
    def __getitem__(self, indices: np.ndarray) -> np.ndarray: ...
    def __getitem__(self, indices: int | np.ndarray) -> int | np.ndarray:
        """The row at a place, or the rows (int64) at an array of places, each in [0, n)."""
        if isinstance(indices, int):
            return int(self[np.array([indices])][0])
        if len(indices) and (indices.min() < 0 or indices.max() >= self.n):
            raise IndexError(f"place {indices.min()} to {indices.max()} of an order of {self.n} rows")
        values = self._network(indices.astype(_U64))
        while len(outside := np.flatnonzero(values >= _U64(self.n))):
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        """One pass: the halves take turns in being moved by a hash of the other."""
        high, low = np.divmod(values, self._low)
        for i in range(0, _ROUNDS, 2):
            # Both terms are below 2**32 after the shift, so the sum does not wrap.
            high = (high + (_mix(low, self._keys[i]) >> _U64(32))) % self._high
            low = (low + (_mix(high, self._keys[i + 1]) >> _U64(32))) % self._low
        return high * self._low + low


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) on values + key, modulo 2**64."""
    x = values + key
    x = (x ^ x >> _U64(30)) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> _U64(27)) * _U64(0x94D049BB133111EB)
    return x ^ x >> _U64(31)
