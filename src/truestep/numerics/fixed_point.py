"""Numbers as 64-bit integers of a power-of-two scale, so that their sums do not depend on order.

x becomes the integer round(x · 2^exponent), half to even. With an exponent from `exponent_for` the largest magnitude of
a step is near 2^37 and may grow to 2^45 before the exponent has to change; 2^17 such integers add up within 2^62. An
fp32 number keeps all its bits down to 2^-12 of the largest, and any number is off by at most 2^-37 of the largest.

CPU and GPU give the same bits: scaling by a power of two is exact in float64, one addition rounds, the rest is integer.
"""

import math

import torch

TARGET_LOG2 = 37
"""Where the largest magnitude of a step is put: 2^36 <= max|x| · 2^exponent < 2^37."""
BOUND_LOG2 = 45
"""Above 2^45 an integer does not fit: the sum of 2^SUMMANDS_LOG2 of them might wrap around."""
SUMMANDS_LOG2 = 17
EXPONENT_LIMIT = 126
"""Exponents lie in [-126, 126], where 2^exponent and 2^-exponent are normal in fp32."""
UNKNOWN = -(2**15)
"""The exponent of what has always been zero: nothing fits but zero."""

# Adding 1.5 · 2^52 to a float64 of magnitude below 2^51 rounds it to an integer, half to even, and leaves that integer
# in the low bits of the sum's pattern. Two passes over memory do what scale, round and convert would do in four.
_LIFT = 1.5 * 2.0**52
_LIFT_BITS = 0x4338000000000000
_BLOCK = {"cpu": 2**17, "cuda": 2**24}
"""Elements at a time: what stays in cache on a CPU, what bounds the scratch memory on a GPU."""
_RUN_LOG2 = 18  # squares that are added up as one int64


def exponent_for(largest: float) -> int:
    """The exponent that puts a finite magnitude just below 2^TARGET_LOG2; UNKNOWN for 0."""
    if largest == 0:
        return UNKNOWN
    return max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, TARGET_LOG2 - math.frexp(largest)[1]))


def next_exponent(exponent: int, largest: float) -> int:
    """The exponent of the next step after one that used `exponent` and met `largest`. Coarser at once, finer by one bit
    a step: a spike does not make the following steps overflow in turn."""
    wanted = exponent_for(largest)
    if UNKNOWN in (exponent, wanted):
        return max(exponent, wanted)
    return min(wanted, exponent + 1)


def fits(exponent: int, largest: float) -> bool:
    """Whether numbers up to `largest` may be rounded with this exponent."""
    if exponent == UNKNOWN or largest == 0:
        return largest == 0
    return math.frexp(largest)[1] + exponent <= BOUND_LOG2


def add_rounded(total_N: torch.Tensor, x_RN: torch.Tensor, exponent: int) -> torch.Tensor:
    """Add every row of `x_RN` (floating), each element rounded by itself, to the int64 `total_N`.

    Returns the largest magnitude in `x_RN`, float64 on its device: infinite or NaN if anything is not finite, and then,
    or where it does not fit, the total is worth nothing. With the exponent UNKNOWN it is only measured.
    """
    rows, length = x_RN.shape
    if x_RN.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=x_RN.device)
    size = min(length, max(1, _BLOCK[x_RN.device.type] // rows))
    scratch = torch.empty(rows * size, dtype=torch.float64, device=x_RN.device)
    extremes = []
    for start in range(0, length, size):
        part_n = total_N[start : start + size]
        wide_Rn = scratch[: rows * len(part_n)].view(rows, -1).copy_(x_RN[:, start : start + size])
        extremes += wide_Rn.aminmax()
        if exponent != UNKNOWN:
            bits_Rn = wide_Rn.mul_(2.0**exponent).add_(_LIFT).view(torch.int64)
            part_n.add_(bits_Rn[0] if rows == 1 else bits_Rn.sum(0)).sub_(signed(rows * _LIFT_BITS))
    return torch.stack(extremes).abs().amax()


def to_float(total_N: torch.Tensor, exponent: int, dtype: torch.dtype) -> torch.Tensor:
    """total · 2^-exponent in fp32 or float64, correctly rounded (results below the normal range aside)."""
    if exponent == UNKNOWN:
        return torch.zeros_like(total_N, dtype=dtype)
    return total_N.to(dtype).mul_(2.0**-exponent)


def sum_of_squares(x_N: torch.Tensor, largest: float) -> torch.Tensor:
    """Σ x² as two int64 limbs (high, low) whose sums over ranks `squares_to_float` reads, given a magnitude that no
    element exceeds, the same on all ranks. Each square is rounded at 2^-45 of largest²; up to 2^48 elements fit."""
    length, block = len(x_N), _BLOCK[x_N.device.type]
    if length == 0 or largest == 0:
        return torch.zeros(2, dtype=torch.int64, device=x_N.device)
    scale, run = 2.0 ** _half_exponent(largest), min(2**_RUN_LOG2, block)
    size = block // run * run
    scratch = torch.empty(min(size, length), dtype=torch.float64, device=x_N.device)
    sums = []
    for start in range(0, length, size):
        part_n = scratch[: min(size, length - start)].copy_(x_N[start : start + size]).mul_(scale)
        bits_n = part_n.mul_(part_n).add_(_LIFT).view(torch.int64)
        whole = len(bits_n) // run * run
        for runs in (bits_n[:whole].view(-1, run), bits_n[whole:].view(1, -1)):
            sums.append(runs.sum(1).sub_(signed(runs.shape[1] * _LIFT_BITS)))
    total = torch.cat(sums)
    return torch.stack([(total >> 32).sum(), (total & 0xFFFFFFFF).sum()])


def squares_to_float(high: list[int], low: list[int], largest: list[float]) -> float:
    """√(Σ over tensors of Σ x²), correctly rounded but for the last bit of the root."""
    shifts = [-2 * _half_exponent(value) if value else 0 for value in largest]
    base = min(shifts, default=0)
    parts = zip(high, low, shifts, strict=True)
    total = sum(((upper << 32) + lower) << (shift - base) for upper, lower, shift in parts)
    spare = total.bit_length() // 2 * 2 - 200  # even, and leaves a root of 100 bits
    return math.ldexp(math.isqrt(total >> spare if spare > 0 else total << -spare), (base + spare) // 2)


def _half_exponent(largest: float) -> int:
    """h with largest · 2^h < 2^22, hence squares below 2^44 and runs of 2^_RUN_LOG2 of them below 2^62."""
    return 22 - math.frexp(largest)[1]


def signed(value: int) -> int:
    """`value` modulo 2^64, as the int64 of the same bits: integer tensors wrap around."""
    return (value + 2**63) % 2**64 - 2**63


GOLDEN = signed(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, and odd: its multiples lie evenly, and are never alike (Steele, Lea and Flood, 2014)."""
