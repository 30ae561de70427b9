"""a bᵀ of two operands: on the device's own units for narrow formats where it has them, else by the same numbers in
wide arithmetic. Products accumulate in fp32.

What a device can do is found out once: a way of scaling is used only if the units' product of a small test case agrees
with the emulated one.
"""

from typing import Any

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from truestep.numerics.formats import E2M1, E4M3
from truestep.numerics.low_precision.operand import Cast, MXScale, NVScale, Operand, RowScale, TensorScale

Units = frozenset[str]
"""Ways of scaling that the device multiplies itself: "tensor", "row", "mx", "nv"."""

_LEAST_CAPABILITY = {"tensor": (8, 9), "row": (9, 0), "mx": (10, 0), "nv": (10, 0)}
_ALIGNED = 16  # the units want K and the columns of the result in multiples of 16 (of 32 two to a byte)


def find_units(device: torch.device) -> Units:
    """The ways of scaling that `device` multiplies itself, tried on a small case."""
    if device.type != "cuda" or torch.version.hip is not None:
        return frozenset()
    capability = torch.cuda.get_device_capability(device)
    return frozenset(way for way, least in _LEAST_CAPABILITY.items() if capability >= least and _agrees(way, device))


def multiply(a: Operand, b: Operand, dtype: torch.dtype, units: Units) -> torch.Tensor:
    """a bᵀ in `dtype` for a (M, K) and b (N, K): (M, N)."""
    way = _way(a, b)
    if way in units and dtype is not torch.float64 and _fits(a, b, way, dtype):
        return _on_units(a, b, dtype, way)
    return emulate(a, b, dtype)


def emulate(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Codes and block scales are exact in fp32; the outer scales multiply the sums, as on the units."""
    wide = torch.promote_types(dtype, torch.float32)
    product = a.inner(wide) @ b.inner(wide).t()
    if a.outer is not None:
        product = product * a.outer.to(wide)
    if b.outer is not None:
        product = product * b.outer.to(wide).t()
    return product.to(dtype)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Block scales (rows, blocks) in the order that the units read: tiles of 128 rows by 4 blocks, padded with 0, each
    tile as 32 times 4 groups of 32 rows apart (cuBLAS, "1D block scaling factors layout")."""
    rows, blocks = scales.shape
    high, wide = -(-rows // 128), -(-blocks // 4)
    padded = torch.zeros(high * 128, wide * 4, dtype=torch.uint8, device=scales.device)
    padded[:rows, :blocks] = scales.view(torch.uint8)
    tiles = padded.view(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def _way(a: Operand, b: Operand) -> str:
    if a.block is None:
        assert a.outer is not None and b.outer is not None
        return "tensor" if a.outer.ndim == b.outer.ndim == 0 else "row"
    return "nv" if a.form is E2M1 else "mx"


def _fits(a: Operand, b: Operand, way: str, dtype: torch.dtype) -> bool:
    if way == "row" and dtype is not torch.bfloat16:
        return False
    return a.codes.shape[1] % _ALIGNED == 0 and b.codes.shape[0] % _ALIGNED == 0


def _on_units(a: Operand, b: Operand, dtype: torch.dtype, way: str) -> torch.Tensor:
    left, right = _scaling(a, way), _scaling(b, way)
    codes = [operand.codes.view(torch.float4_e2m1fn_x2) if way == "nv" else operand.codes for operand in (a, b)]
    return scaled_mm(
        codes[0],
        codes[1].t(),
        scale_a=left[0],
        scale_recipe_a=left[1],
        scale_b=right[0].t() if way == "row" else right[0],
        scale_recipe_b=right[1],
        swizzle_a=left[2],
        swizzle_b=right[2],
        output_dtype=dtype,
    )


def _scaling(operand: Operand, way: str) -> tuple[Any, Any, Any]:
    """Scales, their recipe and their order as scaled_mm takes them."""
    if way == "tensor":
        return operand.outer, ScalingType.TensorWise, None
    if way == "row":
        assert operand.outer is not None
        return operand.outer.expand(len(operand.codes), 1).contiguous(), ScalingType.RowWise, None
    assert operand.block is not None
    if way == "mx":
        return swizzle(operand.block), ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return (
        [swizzle(operand.block), operand.outer],
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
        [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
    )


def _agrees(way: str, device: torch.device) -> bool:
    casts: dict[str, Cast] = {
        "tensor": TensorScale(E4M3),
        "row": RowScale(E4M3),
        "mx": MXScale(E4M3, "ceil"),
        "nv": NVScale(),
    }
    cast = casts[way]
    x = torch.linspace(-3, 3, 2 * 128 * 256, device=device).sin().view(2, 128, 256)
    a, b = (cast(one, cast.amax(one, ())) for one in x)
    want = emulate(a, b, torch.bfloat16).float()
    try:
        got = _on_units(a, b, torch.bfloat16, way).float()
    except (RuntimeError, NotImplementedError, ValueError):
        return False  # this build has no such kernel for this device
    return bool((got - want).norm() <= 1e-2 * want.norm())
