"""Rows in order of a key, and back: what expert dispatch is made of. Nothing here adds in an order that may change.

M rows are N tokens times K choices; `order` lists the rows as they stand grouped, `inverse` undoes it.
"""

from typing import Any, NamedTuple

import torch


class Grouping(NamedTuple):
    """rows[order] is grouped; grouped[inverse] are the rows; group g ends before ends[g] (int32)."""

    order: torch.Tensor
    inverse: torch.Tensor
    ends: torch.Tensor


def group(keys_M: torch.Tensor, num_groups: int) -> Grouping:
    """Group rows by keys in [0, num_groups); rows of equal key stay in their order. Reads nothing back to the host."""
    grouped, order = keys_M.sort(stable=True)
    groups = torch.arange(num_groups, device=keys_M.device)
    return Grouping(order, inverted(order), torch.searchsorted(grouped, groups, right=True, out_int32=True))


def inverted(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def permute(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """rows[order]; backward is a permutation too, not an addition."""
    return _Permute.apply(rows, order, inverse)  # pyright: ignore[reportReturnType]


def spread(x_ND: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Each token once for each of its K = M / N choices, in `order`; backward adds its K gradients in their order."""
    return _Spread.apply(x_ND, order, inverse)  # pyright: ignore[reportReturnType]


def combine(rows_NKD: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    """sum_k weights[n, k] rows[n, k], added in the dtype of the weights, in the dtype of the rows."""
    return _Combine.apply(rows_NKD, weights_NK)  # pyright: ignore[reportReturnType]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.choices = len(order) // max(len(x_ND), 1)
        return x_ND.index_select(0, order // max(ctx.choices, 1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows = grads[0].index_select(0, ctx.saved_tensors[0])
        wide = torch.promote_types(rows.dtype, torch.float32)
        by_token = rows.unflatten(0, (-1, ctx.choices)) if ctx.choices else rows[:, None]
        return by_token.sum(1, dtype=wide).to(rows.dtype), None, None


class _Combine(torch.autograd.Function):
    """One choice at a time, so that no copy of all rows in a wider dtype is ever made."""

    @staticmethod
    def forward(ctx: Any, rows_NKD: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows_NKD, weights_NK)
        y_ND = weights_NK.new_zeros(rows_NKD.shape[0], rows_NKD.shape[2])
        for rows_ND, weight_N in zip(rows_NKD.unbind(1), weights_NK.unbind(1)):
            y_ND.addcmul_(rows_ND.to(y_ND.dtype), weight_N[:, None])
        return y_ND.to(rows_NKD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows_NKD, weights_NK = ctx.saved_tensors
        grad_ND = grads[0].to(weights_NK.dtype)
        to_rows = torch.empty_like(rows_NKD)
        to_weights = torch.empty_like(weights_NK)
        for k in range(weights_NK.shape[1]):
            to_rows[:, k] = grad_ND * weights_NK[:, k, None]
            to_weights[:, k] = (rows_NKD[:, k].to(grad_ND.dtype) * grad_ND).sum(-1)
        return to_rows, to_weights
