"""Matrix products in one with the collective before or after them (asynchronous tensor parallelism, arXiv 2105.05720).

A part of a gathered tensor is multiplied while the next is under way, and a part of a product is sent while the next is
computed: torch's operators over symmetric memory, which a GPU reads and writes in its neighbours. They exist for CUDA
alone; a CPU takes what they fall back to, one after the other, so that the way there and back is tested without one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric

from truestep.errors import UserError
from truestep.numerics.axis import Axis


def require_symmetric_memory(axis: Axis, device: torch.device) -> None:
    """Raise UserError where the ranks of an axis cannot reach each other's memory. All of them call this."""
    if device.type != "cuda" or axis.group is None:
        return
    try:
        symmetric.get_symm_mem_workspace(axis.group.group_name, 1)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"machine.async_tp needs ranks of mesh.{axis.name} that reach each other's memory (one host, or one NVLink "
            f"domain), which failed: {reason}; set it to false, or lower mesh.{axis.name}"
        ) from error


def gathered_products(x: torch.Tensor, weights: Sequence[torch.Tensor], axis: Axis, dim: int) -> list[torch.Tensor]:
    """[linear(axis.gather(x, dim), weight) for weight in weights]; `axis` has more than one rank."""
    x, *cast = _in_one_dtype(x, *weights)
    return list(_GatheredProducts.apply(x, axis, dim, *cast))  # pyright: ignore[reportArgumentType]


def product_scattered(x: torch.Tensor, weight: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """axis.scatter_sum(linear(x, weight), dim); `axis` has more than one rank."""
    x, weight = _in_one_dtype(x, weight)
    return _ProductScattered.apply(x, weight, axis, dim)  # pyright: ignore[reportReturnType]


def _in_one_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """As autocast does it for a product."""
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[0].dtype
    return [x.to(dtype) for x in tensors]


def _gather_matmul(
    x: torch.Tensor, matrices: list[torch.Tensor], axis: Axis, dim: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The parts of all ranks along `dim`, and their products with the matrices."""
    assert axis.group is not None
    cuda = x.device.type == "cuda"
    operator: Any = torch.ops.symm_mem.fused_all_gather_matmul if cuda else symmetric._fused_all_gather_matmul_fallback
    return operator(x, matrices, dim, axis.group.group_name)


def _matmul_scatter(x: torch.Tensor, matrix: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part along `dim` of the sum over ranks of the product."""
    assert axis.group is not None
    cuda = x.device.type == "cuda"
    operator: Any = (
        torch.ops.symm_mem.fused_matmul_reduce_scatter if cuda else symmetric._fused_matmul_reduce_scatter_fallback
    )
    return operator(x, matrix, "sum", dim, axis.group.group_name)


def _rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """As a matrix whose rows go along `dim` first, which is how the operators lay things out."""
    return x.movedim(dim, 0).flatten(0, -2)


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole, products = _gather_matmul(x, [weight.t() for weight in weights], axis, dim)
        ctx.save_for_backward(whole, *weights)
        ctx.axis, ctx.dim = axis, dim
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        of_x = _matmul_scatter(torch.cat(grads, -1), torch.cat(weights), ctx.axis, ctx.dim)
        rows = _rows(whole, ctx.dim)
        return of_x, None, None, *(_rows(grad, ctx.dim).t() @ rows for grad in grads)


class _ProductScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.dim = axis, dim
        return _matmul_scatter(x, weight.t(), axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole, (of_x,) = _gather_matmul(grads[0], [weight], ctx.axis, ctx.dim)
        return of_x, _rows(whole, ctx.dim).t() @ _rows(x, ctx.dim), None, None
