"""A further use of a parameter, whose gradient is to be kept apart from that of the first."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def as_use(weight: torch.Tensor, sink: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """`weight`, for one more use in the same microbatch. In the backward pass the gradient of that use goes to `sink`,
    whole and unsharded, and not to `weight.grad`."""
    return _Use.apply(weight, sink)


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, sink: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.sink = sink
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.sink(grad)
        return None, None
