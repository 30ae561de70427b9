"""The products of experts in low precision: rows of tokens, each times the weight of its expert.

Which rows lie together on a rank depends on the mesh: they come from other ranks and other microbatches. So nothing is
shared between rows: scales are a row's own (or its blocks'), gradients are rounded to nearest, and the weight's
gradient is the product of plain gradients and of x as the forward pass saw it. Weights have scales of their expert.
"""

from typing import Any

import torch
from torch.nn.functional import grouped_mm

from truestep.errors import UserError
from truestep.numerics.formats import E4M3
from truestep.numerics.low_precision.operand import Cast, MXScale, NVRowScale, NVScale, Operand, RowScale
from truestep.recipe.numerics import LowPrecision


class LowPrecisionExperts:
    """(rows (M, inputs), W (experts, outputs, inputs), ends (experts,)) -> (M, outputs): rows [ends[e - 1], ends[e])
    times the transposed W[e]. Both fp8 kinds scale by rows. Emulated around wide products; kept for backward is the
    low format."""

    def __init__(self, section: LowPrecision):
        self.kind = section.kind
        self.rows, self.weight = _casts(section)

    def check(self, name: str, shape: tuple[int, int]) -> None:
        """UserError where blocks do not fit a weight of (outputs, inputs); no rank holds a part of one."""
        block = self.rows.block
        for what, size in zip(("outputs", "inputs"), shape):
            if size % block:
                raise UserError(
                    f"numerics.low_precision.kind = {self.kind!r} scales blocks of {block} values, but the experts of "
                    f"{name} have {size} {what}; the nearest number that fits is {max(1, round(size / block)) * block}."
                )

    def __call__(self, rows_MI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        kind = rows_MI.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows_MI.dtype
        with torch.autocast(kind, enabled=False):
            return _Grouped.apply(rows_MI, weight_EOI, ends_E, self, dtype)  # pyright: ignore[reportReturnType]

    def cast_weight(self, weight_EOI: torch.Tensor) -> Operand:
        """All experts' weights one above the other, each with scales of its own."""
        num, outputs, _ = weight_EOI.shape
        matrix = weight_EOI.float().flatten(0, 1).contiguous()
        amax = matrix.abs().view(num, -1).amax(1).repeat_interleave(outputs)[:, None]
        return self.weight(matrix, amax)


def _casts(section: LowPrecision) -> tuple[Cast, Cast]:
    if section.kind == "nvfp4":
        return NVRowScale(), NVScale(square=True)
    cast = MXScale(E4M3, section.block_scale) if section.kind == "mxfp8" else RowScale(E4M3)
    return cast, cast


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows, weight, ends, experts: LowPrecisionExperts, dtype: torch.dtype):
        low = experts.rows(rows.to(dtype).float().contiguous(), None)
        y = _multiply(low, experts.cast_weight(weight.to(dtype)), ends, dtype)
        ctx.save_for_backward(weight, ends, *low.tensors)
        ctx.kept = (experts, dtype, low.form, rows.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        experts, dtype, form, rows_dtype = ctx.kept
        weight, ends, *tensors = ctx.saved_tensors
        g = grads[0]
        d_rows = d_weight = None
        if ctx.needs_input_grad[0]:
            turned = experts.cast_weight(weight.to(dtype).transpose(1, 2))
            d_rows = _multiply(experts.rows(g.float().contiguous(), None), turned, ends, dtype).to(rows_dtype)
        if ctx.needs_input_grad[1]:
            seen = Operand(form, *tensors).values(dtype)
            d_weight = _over_rows(g.to(dtype), seen, ends).to(weight.dtype)
        return d_rows, d_weight, None, None, None


def _multiply(rows: Operand, weight: Operand, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes and block scales are exact in the dtype of the product; outer scales multiply its result."""
    num = len(ends)
    kernel = has_kernel(rows.codes.device, dtype, rows.codes.shape[1], len(weight.codes) // num)
    wide = dtype if kernel else torch.promote_types(dtype, torch.float32)
    right = weight.inner(wide).unflatten(0, (num, -1))
    y = grouped(rows.inner(wide), right.transpose(1, 2), ends, kernel)
    if weight.outer is not None:
        expert = torch.bucketize(torch.arange(len(y), device=ends.device), ends, right=True)
        outer = weight.outer.to(wide).view(num, -1)
        y = y * outer[expert.clamp(max=num - 1)]
    return (y if rows.outer is None else y * rows.outer.to(wide)).to(dtype)


def grouped(rows: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, kernel: bool) -> torch.Tensor:
    """(M, K), (experts, K, N) -> (M, N)."""
    if kernel:
        return grouped_mm(rows, right, offs=ends)
    return torch.cat([part @ own for part, own in zip(rows.split(_sizes(ends)), right)])


def _over_rows(g: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(M, O), (M, I) -> (experts, O, I): the products over each expert's rows."""
    if has_kernel(g.device, g.dtype, g.shape[1], x.shape[1]):
        return grouped_mm(g.contiguous().t(), x, offs=ends)  # the rows of each expert need no alignment this way round
    parts = zip(g.split(_sizes(ends)), x.split(_sizes(ends)))
    return torch.stack([part.t() @ own for part, own in parts])


def has_kernel(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether there is a grouped product for rows of `sizes` values: whole 16 bytes of bfloat16, on CUDA."""
    return device.type == "cuda" and dtype is torch.bfloat16 and not any(size % 8 for size in sizes)


def _sizes(ends: torch.Tensor) -> list[int]:
    return torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
