"""The numbers that a quantised weight can be: scales from a weight, codes, and what codes stand for.

O outputs, I inputs, G groups of a row. value = scale_OG · (code - zero_OG), of nvfp4 scale_OG / outer · code.
"""

from dataclasses import dataclass

import torch

from truestep.numerics.formats import E2M1, E4M3, decode, encode
from truestep.numerics.quantised.scheme import NV_BLOCK, Scheme

_LEAST_NV_SCALE = 0.125
"""Block scale of a block without a number that matters; any would do."""
_LARGEST_OUTER = 2.0**110


@dataclass(frozen=True)
class Scales:
    """`scale_OG` in the dtype that it is stored in; `zero_OG` int8 or None; `outer` fp32 (1,) or None."""

    scale_OG: torch.Tensor
    zero_OG: torch.Tensor | None = None
    outer: torch.Tensor | None = None

    def rows(self, rows: slice) -> "Scales":
        """Those of some outputs."""
        return Scales(self.scale_OG[rows], None if self.zero_OG is None else self.zero_OG[rows], self.outer)


def find_scales(
    weight_OI: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    importance_I: torch.Tensor | None = None,
    top: float = 0,
) -> Scales:
    """Scales for a finite fp32 weight whose rows the groups divide, rounded to `dtype` where they are stored in it.

    Integer scales are those of the least squared error among some that cut the largest values off, errors weighted by
    `importance_I` (> 0), which is given where GPTQ moves weights as it goes. `top`: largest magnitude of what shares
    the outer scale (of nvfp4), by default the weight's.
    """
    blocks = weight_OI.unflatten(-1, (-1, scheme.group or weight_OI.shape[-1]))
    if scheme.kind == "nvfp4":
        return _nv_scales(blocks, top or float(weight_OI.abs().max()))
    if scheme.kind == "fp8":
        return Scales(_storable(blocks.abs().amax(-1) / E4M3.largest, dtype))
    importance = None if importance_I is None else importance_I.unflatten(0, blocks.shape[1:])
    best, least = None, None
    # squares of errors as shares of the largest value: those of tiny and of huge ones are no numbers
    unit = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    for share in _shares(scheme, moving=importance_I is not None):
        found = _int_scales(blocks, scheme, dtype, share)
        error = (_int_values(_int_codes(blocks, found, scheme), found).float() - blocks).div(unit).square()
        error = (error if importance is None else error * importance).sum(-1)
        if best is None or least is None:
            best, least = found, error
            continue
        better = error < least
        zero = None
        if best.zero_OG is not None and found.zero_OG is not None:
            zero = torch.where(better, found.zero_OG, best.zero_OG)
        best, least = (
            Scales(torch.where(better, found.scale_OG, best.scale_OG), zero),
            torch.where(better, error, least),
        )
    assert best is not None
    return best


def to_codes(weight_OI: torch.Tensor, scales: Scales, scheme: Scheme) -> torch.Tensor:
    """The nearest codes (O, I): int8, e4m3, or of nvfp4 bytes (O, I / 2) of two codes, the first low."""
    blocks = weight_OI.unflatten(-1, (-1, weight_OI.shape[-1] // scales.scale_OG.shape[-1]))
    if scheme.kind == "int":
        return _int_codes(blocks, scales, scheme).flatten(-2)
    scaled = (blocks / _wide(scales)[..., None]).flatten(-2)
    return encode(scaled, E2M1 if scheme.kind == "nvfp4" else E4M3)


def to_values(codes: torch.Tensor, scales: Scales, scheme: Scheme) -> torch.Tensor:
    """What codes stand for, (O, I), in the dtype of the scales; of nvfp4 in float32."""
    groups = scales.scale_OG.shape[-1]
    if scheme.kind == "int":
        return _int_values(codes.unflatten(-1, (groups, -1)), scales).flatten(-2)
    if scheme.kind == "fp8":
        return codes.to(scales.scale_OG.dtype) * scales.scale_OG
    return (decode(codes, E2M1).unflatten(-1, (groups, -1)) * _wide(scales)[..., None]).flatten(-2)


def nv_inputs(x: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """x (..., I) as nvfp4 with block scales of its own under a fixed outer scale, in its dtype."""
    blocks = x.float().unflatten(-1, (-1, NV_BLOCK))
    # the largest by 6 in the dtype of x, as the layout's package has it: a scale that it rounds otherwise moves codes
    most = (x.unflatten(-1, (-1, NV_BLOCK)).abs().amax(-1) / E2M1.largest).float()
    scale = _wide(Scales(_nv_block_scale(most, outer), outer=outer))
    codes = encode((blocks / scale[..., None]).contiguous(), E2M1)
    return (decode(codes, E2M1) * scale[..., None]).flatten(-2).to(x.dtype)


def nv_outer(top: float) -> torch.Tensor:
    """The outer scale, fp32 (1,): block scales of values up to `top` then reach up to the largest e4m3."""
    return torch.tensor([min(E4M3.largest * E2M1.largest / max(top, 1e-45), _LARGEST_OUTER)], dtype=torch.float32)


def _shares(scheme: Scheme, moving: bool) -> tuple[float, ...]:
    """Of the plain scale, which spreads all values over all codes; first those with which nothing is cut off. With
    half a code more than the largest has, a symmetric scale rounds its largest values down by half a step. Weights
    that are `moving` while they are rounded may leave the range that they had, and are given more room."""
    cuts = (0.95, 0.9) if moving else (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5)
    if not scheme.symmetric:
        return (1.0, 1.04) if moving else (1.0, *cuts)
    middle = -scheme.lowest - 0.5
    return (1.0, middle / (middle - 0.5), middle / (middle + 0.5), *cuts)


def _int_scales(blocks: torch.Tensor, scheme: Scheme, dtype: torch.dtype, share: float) -> Scales:
    levels = (1 << scheme.bits) - 1
    if scheme.symmetric:
        return Scales(_storable(blocks.abs().amax(-1) / (levels / 2) * share, dtype))
    low, high = blocks.amin(-1).clamp(max=0) * share, blocks.amax(-1).clamp(min=0) * share
    scale = _storable(high / levels - low / levels, dtype)
    zero = (scheme.lowest - low / scale.float()).round().clamp(scheme.lowest, -scheme.lowest - 1)
    return Scales(scale, zero.to(torch.int8))


def _int_codes(blocks: torch.Tensor, scales: Scales, scheme: Scheme) -> torch.Tensor:
    scaled = blocks / scales.scale_OG.float()[..., None]
    if scales.zero_OG is not None:
        scaled = scaled + scales.zero_OG[..., None]
    return scaled.clamp(scheme.lowest, -scheme.lowest - 1).round().to(torch.int8)


def _int_values(codes: torch.Tensor, scales: Scales) -> torch.Tensor:
    values = codes.to(scales.scale_OG.dtype)
    if scales.zero_OG is not None:
        values = values - scales.zero_OG.to(values.dtype)[..., None]
    return values * scales.scale_OG[..., None]


def _storable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype`, never 0, which codes could not be divided by, and finite."""
    limits = torch.finfo(dtype)
    return scale.clamp(limits.tiny, limits.max).to(dtype)


def _nv_scales(blocks: torch.Tensor, top: float) -> Scales:
    outer = nv_outer(top).to(blocks.device)
    return Scales(_nv_block_scale(blocks.abs().amax(-1) / E2M1.largest, outer), outer=outer)


def _nv_block_scale(plain: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    scale = encode(plain * outer, E4M3)
    return torch.where(scale.float() == 0, _LEAST_NV_SCALE, scale.float()).to(E4M3.dtype)


def _wide(scales: Scales) -> torch.Tensor:
    """What divides values before they are codes, fp32."""
    scale = scales.scale_OG.float()
    return scale if scales.outer is None else scale / scales.outer
