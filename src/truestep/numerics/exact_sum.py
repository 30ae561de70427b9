"""Sums of a few host numbers, exact whatever their order and however they are spread over ranks.

A number is counted in units of 2^-100 and cut into limbs of 40 bits, which add up as int64 by themselves.
"""

import math
from collections.abc import Sequence

_UNIT_LOG2, _LIMB_BITS, _NUM_LIMBS = 100, 40, 5
LIMBS = _NUM_LIMBS + 1
"""Integers per sum: the limbs, lowest first and the highest signed, and how many summands were out of range."""
_RANGE = 2.0**120


def to_limbs(values: Sequence[float]) -> list[int]:
    """The sum of `values` as integers; those of several ranks may be added one by one, up to 2^20 ranks. Below 2^-100
    an addend is rounded down by itself."""
    kept = [value for value in values if math.isfinite(value) and abs(value) < _RANGE]
    total = 0
    for value in kept:
        numerator, denominator = value.as_integer_ratio()
        total += (numerator << _UNIT_LOG2) // denominator
    limbs = []
    for _ in range(_NUM_LIMBS - 1):
        limbs.append(total & (2**_LIMB_BITS - 1))
        total >>= _LIMB_BITS
    return [*limbs, total, len(values) - len(kept)]


def from_limbs(limbs: Sequence[int]) -> float:
    """The sum, correctly rounded; NaN if a summand was not finite or not below 2^120."""
    *parts, out_of_range = limbs
    if out_of_range:
        return math.nan
    return sum(limb << (_LIMB_BITS * index) for index, limb in enumerate(parts)) / 2**_UNIT_LOG2
