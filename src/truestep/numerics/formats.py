"""The narrow number formats, bit for bit: e4m3 and e5m2 (8 bits), e2m1 (4 bits, two a byte), e8m0 (scales).

Casts saturate: a finite value beyond the largest becomes the largest. Nearest rounding breaks ties to the even code.
fp8: arXiv 2209.05433; e2m1 and e8m0: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 and 5.4.1.
"""

import math
from itertools import pairwise

import torch


class Format:
    """Values ±m·2^e with `mantissa` fraction bits and exponents from `low` (below it, the same spacing down to zero);
    `largest` is the largest finite value, in the binade 2^`high`. `dtype` is torch's, or uint8 for packed pairs."""

    def __init__(self, name: str, dtype: torch.dtype, mantissa: int, low: int, high: int, largest: float):
        self.name, self.dtype = name, dtype
        self.mantissa, self.low, self.high, self.largest = mantissa, low, high, largest


E4M3 = Format("e4m3", torch.float8_e4m3fn, mantissa=3, low=-6, high=8, largest=448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, mantissa=2, low=-14, high=15, largest=57344.0)
E2M1 = Format("e2m1", torch.uint8, mantissa=1, low=0, high=2, largest=6.0)

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midways between neighbours. A tie goes to the even code; where that is the upper one, the border is the fp32 number
# just below (an fp32 has 29 bits less than the float64 that math.ulp speaks of).
_E2M1_BORDERS = tuple(
    middle if code % 2 == 0 else middle - math.ulp(middle) * 2.0**29
    for code, middle in enumerate((low + high) / 2 for low, high in pairwise(_E2M1_VALUES))
)
_E8M0_NAN = 255
_E8M0_BIAS = 127


def encode(x: torch.Tensor, form: Format) -> torch.Tensor:
    """fp32 to codes, nearest even, saturating. e2m1: bytes of two codes along the last dimension, the first low."""
    # torch before 2.12 does not saturate in the cast; NaN passes through the clamp
    x = x.clamp(-form.largest, form.largest)
    return pack(_e2m1_codes(x)) if form is E2M1 else x.to(form.dtype)


def decode(codes: torch.Tensor, form: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Codes to values, exactly."""
    if form is not E2M1:
        return codes.to(dtype)
    signed = torch.tensor([sign * v for sign in (1.0, -1.0) for v in _E2M1_VALUES], dtype=dtype, device=codes.device)
    return signed[unpack(codes).int()]


def round_stochastic(x: torch.Tensor, form: Format, draws: torch.Tensor) -> torch.Tensor:
    """fp32 to a neighbour that `form` has: up with a probability of its share of the way between the two, to 2^-17.

    `draws`: integers in [0, 2^16), of x's shape. Saturates; values that the format has stay. The result is fp32, and
    `encode` of it rounds no more."""
    x = x.clamp(-form.largest, form.largest)
    spacing = power_of_two((floor_log2(x) - form.mantissa).clamp(min=form.low - form.mantissa))
    steps = x.abs() / spacing  # exact: a division by a power of two
    whole = steps.floor()
    up = (draws + 0.5) * 2.0**-16 < steps - whole
    # NaN compares as "not up" and stays NaN in `whole`
    return torch.copysign((whole + up) * spacing, x)


def floor_log2(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 |x|) of fp32 from its exponent bits, int32; -127 for zero and subnormals, 128 for Inf and NaN."""
    return ((x.view(torch.int32) >> 23) & 0xFF) - 127


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32, exactly, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of 4-bit codes (..., n) to (..., n / 2), the layout that torch.float4_e2m1fn_x2 views."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def e8m0_scale(amax: torch.Tensor, form: Format, rule: str) -> torch.Tensor:
    """The scale of blocks whose largest magnitudes are `amax` (fp32), as float8_e8m0fnu.

    "floor": 2^(floor(log2 amax) - form.high), MX v1.0 section 6.3; values between form.largest and 2^(form.high + 1)
    are clipped. "ceil": the least power of two that is not below amax / form.largest (arXiv 2506.08027, section 3.2);
    nothing is clipped. A block with Inf or NaN gets NaN, so that it is seen."""
    if rule == "floor":
        exponent = floor_log2(amax) - form.high
    else:
        ratio = amax / form.largest
        exponent = floor_log2(ratio) + ((ratio.view(torch.int32) & 0x7FFFFF) != 0)
    biased = exponent.clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS
    biased = torch.where(amax.isfinite(), biased, _E8M0_NAN)
    return biased.to(torch.uint8).view(torch.float8_e8m0fnu)


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """4-bit codes in bytes: sign, then the number of the magnitude."""
    borders = torch.tensor(_E2M1_BORDERS, dtype=torch.float32, device=x.device)
    magnitude = torch.bucketize(x.abs(), borders, out_int32=True)
    return (magnitude + 8 * x.signbit()).to(torch.uint8)
