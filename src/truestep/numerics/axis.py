"""One axis of the mesh as a rank sees it, with the collectives that a model needs, differentiable.

One view holds throughout: the loss of the job is the sum of what its ranks contribute, and the gradient that a rank has
of a tensor is its share. So the backward pass of each collective is its adjoint: a gather's is a reduce-scatter, a
sum's is a sum, that of cutting a copy down to a part is plain slicing. A parameter that several ranks hold whole has
on each of them a share of its gradient, to be summed once a step.

An axis of size 1 has no group, and every method gives back its very input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from truestep.numerics.batch import columns
from truestep.recipe.machine import Context

# torch 2.13 renames the collectives and warns of the old names; 2.11 has only those.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Axis:
    """`rank` of `size` ranks along the axis `name`, which talk through `group`. `fuses`: matrix products are to be one
    with the gathers and sums before and after them (numerics.fused)."""

    fuses = False

    def __init__(self, name: str, size: int = 1, rank: int = 0, group: dist.ProcessGroup | None = None):
        assert size == 1 or group is not None, name
        self.name, self.size, self.rank, self.group = name, size, rank, group

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The equal parts of all ranks, in rank order along `dim`; backward sums and cuts."""
        return x if self.size == 1 else _Gather.apply(x, self, dim)  # pyright: ignore[reportReturnType]

    def scatter_sum(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part along `dim` (which `size` divides) of the sum over ranks; backward gathers."""
        return x if self.size == 1 else _ScatterSum.apply(x, self, dim)  # pyright: ignore[reportReturnType]

    def part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part along `dim` (which `size` divides) of what every rank holds; no communication."""
        return x if self.size == 1 else x.chunk(self.size, dim)[self.rank]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank; backward sums as well."""
        return x if self.size == 1 else _Sum.apply(x, self)  # pyright: ignore[reportReturnType]

    def collect(self, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Parts of `sizes` along `dim`, for ranks that all go on to compute the very same from the whole: backward
        takes this rank's part of the gradient, which is everybody's."""
        return x if self.size == 1 else _Collect.apply(x, self, dim, tuple(sizes))  # pyright: ignore[reportReturnType]

    def exchange(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """All-to-all of rows (dim 0): `sent[r]` of them go to rank r, `received[r]` come from it; backward returns."""
        if self.size == 1:
            return x
        return _Exchange.apply(x, self, list(received), list(sent))  # pyright: ignore[reportReturnType]

    def max_(self, x: torch.Tensor) -> torch.Tensor:
        """In place, the largest over ranks. Not differentiable."""
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """In place, the sum over ranks. Not differentiable."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x


@dataclass(frozen=True)
class Axes:
    """The axes along which a model's own computation is split, and the way in which cp splits rows."""

    tp: Axis = field(default_factory=lambda: Axis("tp"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    context: Context = field(default_factory=Context)

    def columns(self, length: int) -> list[range]:
        """The places of a row of `length` tokens that this rank owns along cp, in the order in which it holds them."""
        parts = self.context.parts_per_rank if self.cp.size > 1 else 1
        return columns(length, self.cp.size, self.cp.rank, parts)

    @property
    def order(self) -> list[int]:
        """The equal parts of a row by number, in the order in which the ranks along cp, one by one, hold them."""
        parts = self.context.parts_per_rank if self.cp.size > 1 else 1
        size = self.cp.size
        return [place.start for rank in range(size) for place in columns(size * parts, size, rank, parts)]


def gathered(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Plain all-gather of equal parts along `dim`."""
    rows = x.movedim(dim, 0).contiguous()
    out = rows.new_empty(axis.size * rows.shape[0], *rows.shape[1:])
    all_gather(out, rows, group=axis.group)
    return out.movedim(0, dim)


def summed_part(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Plain reduce-scatter: this rank's part along `dim` of the sum, in the dtype of `x`."""
    rows = x.movedim(dim, 0).contiguous()
    assert rows.shape[0] % axis.size == 0, (axis.name, tuple(x.shape), dim)
    out = rows.new_empty(rows.shape[0] // axis.size, *rows.shape[1:])
    reduce_scatter(out, rows, group=axis.group)
    return out.movedim(0, dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return gathered(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return summed_part(grads[0], ctx.axis, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return summed_part(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gathered(grads[0], ctx.axis, ctx.dim), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return axis.sum_(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.axis.sum_(grads[0].contiguous().clone()), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        rows = x.movedim(dim, 0)
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        parts = gathered(padded, axis, 0).chunk(axis.size)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)]).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grads[0].split(ctx.sizes, ctx.dim)[ctx.axis.rank], None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.axis, ctx.received, ctx.sent = axis, received, sent
        return exchanged(x, axis, received, sent)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchanged(grads[0], ctx.axis, ctx.sent, ctx.received), None, None, None


def exchanged(x: torch.Tensor, axis: Axis, received: list[int], sent: list[int]) -> torch.Tensor:
    """Plain all-to-all of rows."""
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=axis.group)
    return out
