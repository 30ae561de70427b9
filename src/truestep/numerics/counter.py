"""Random numbers by counter: a value depends on (key, index) alone, never on what was drawn before, where, or by whom.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on int64 tensors, then the
Box-Muller transform in float64. Only integer operations and + - * / sqrt of IEEE 754 are used, one eager operation
each (nothing that a compiler could fuse into a multiply-add), so that CPU and GPU give the same bits.
"""

import hashlib
import math
from collections.abc import Sequence
from itertools import product

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Elements at a time: on a CPU the temporaries stay in cache; a GPU would do little but start kernels. Memory does not
grow with the tensor."""


def key_of(seed: int, name: str) -> int:
    """A 64-bit key for the stream `name` of `seed`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


def words(key: int, block: torch.Tensor) -> torch.Tensor:
    """The four 32-bit words of each block: int64 (..., 4) with values in [0, 2^32), for int64 `block` (...)."""
    c0, c1 = block & _LOW, (block >> 32) & _LOW
    c2, c3 = torch.zeros_like(block), torch.zeros_like(block)
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        # int64 products wrap, which leaves the 64 bits of the unsigned product; the mask undoes the signed shift
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, ((p0 >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform(key: int, start: int, count: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Elements [start, start + count) of a stream of float64 in (0, 1), each the middle of one of 2^32 cells."""
    first = start // 4
    block = torch.arange(first, (start + count + 3) // 4, device=device)
    return _unit(words(key, block)).flatten()[start - 4 * first :][:count]


def normal(key: int, start: int, count: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Elements [start, start + count) of a stream of standard normal float32."""
    return _runs(key, torch.tensor([start], device=device), count).flatten()


def init_shard(
    name: str,
    seed: int,
    shape: Sequence[int],
    slices: Sequence[slice],
    std: float,
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The region `slices` (step 1) of a parameter of `shape` filled with normal(0, std), float32, without making the
    rest. Element i (row-major in the whole parameter) is the same number whatever the region, device or world size."""
    starts = [s.indices(n)[0] for s, n in zip(slices, shape)]
    sizes = [max(0, s.indices(n)[1] - s.indices(n)[0]) for s, n in zip(slices, shape)]
    # trailing dimensions that are whole make longer runs of neighbouring elements
    whole = len(shape)
    while whole > 0 and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    run = math.prod(sizes[outer:])
    if run == 0 or 0 in sizes:
        return torch.empty(sizes, device=device)
    begin = sum(start * stride for start, stride in zip(starts, strides))
    offsets = torch.tensor([begin], device=device)
    for dim in range(outer):
        step = torch.arange(sizes[dim], device=device) * strides[dim]
        offsets = (offsets[:, None] + step).flatten()
    return _runs(key_of(seed, name), offsets, run).mul_(std).view(sizes)


def _runs(key: int, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Standard normal elements starts[r] .. starts[r] + length - 1 of the stream, float32 (runs, length)."""
    out = torch.empty(len(starts), length, device=starts.device)
    chunk = _CHUNK[starts.device.type]
    rows, columns = max(1, chunk // length), min(length, chunk)
    for row, column in product(range(0, len(starts), rows), range(0, length, columns)):
        first = starts[row : row + rows, None] + column
        width = min(columns, length - column)
        block = torch.arange((width + 6) // 4, device=starts.device) + (first >> 2)
        values = _box_muller(_unit(words(key, block))).flatten(1)
        if len(first) == 1:
            lead = int(first[0, 0]) & 3
            out[row, column : column + width] = values[0, lead : lead + width]
        else:
            index = (first & 3) + torch.arange(width, device=starts.device)
            out[row : row + rows, column : column + width] = values.gather(1, index)
    return out


def _unit(word: torch.Tensor) -> torch.Tensor:
    return (word.double() + 0.5) * 2.0**-32


def _box_muller(u: torch.Tensor) -> torch.Tensor:
    """float64 uniforms (..., 4) in (0, 1) to standard normals (..., 4): r cos t, r sin t of both pairs."""
    radius = torch.sqrt(_log(u[..., :2]) * -2.0)
    sine, cosine = _turn(u[..., 2:])
    return torch.cat((radius * cosine, radius * sine), dim=-1)


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """sum_i coefficients[i] x^i by Horner's rule, a multiplication and an addition apart."""
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total.mul_(x).add_(c)
    return total


def _log(u: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of normal positive float64: the exponent from the bits, the mantissa m in [1, 2) / sqrt 2 by
    the series 2 artanh(s), s = (m - 1) / (m + 1), whose terms end below 2e-16 at |s| <= 0.1716."""
    bits = u.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64) * math.sqrt(0.5)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(s * s, [2.0 / (2 * i + 1) for i in range(11)]) * s
    return (exponent.double() + 0.5) * math.log(2.0) + series


def _turn(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sin, cos) of 2 pi u for u in (0, 1): the eighth of a turn by its Taylor series, the quadrant by exchange."""
    quadrant = (u * 4.0 + 0.5).to(torch.int64)  # truncates: the nearest quarter turn, 0..4
    angle = (u - quadrant.double() * 0.25) * (2.0 * math.pi)  # |angle| <= pi / 4; the difference is exact
    square = angle * angle
    sine = _polynomial(square, [(-1.0) ** i / math.factorial(2 * i + 1) for i in range(9)]) * angle
    cosine = _polynomial(square, [(-1.0) ** i / math.factorial(2 * i) for i in range(9)])
    odd = (quadrant & 1) == 1
    swapped_sine, swapped_cosine = torch.where(odd, cosine, sine), torch.where(odd, sine, cosine)
    sine_sign = 1.0 - (quadrant & 2).double()
    cosine_sign = 1.0 - ((quadrant + 1) & 2).double()
    return swapped_sine * sine_sign, swapped_cosine * cosine_sign
