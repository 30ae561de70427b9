"""Losses of rows of logits, fused with the output matrix: a few rows of logits at a time.

For a loss whose gradient is known as soon as its value is: both are made while a chunk's logits exist, in the forward
pass, so that no more than `chunk_tokens` rows of them ever do (as in truestep.losses.cross_entropy). With softcap c the
logits are x = c·tanh(u / c) of the products u, and du = dx·(1 - (x / c)²).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from truestep.numerics.batch import IGNORE
from truestep.numerics.head import HeadInput

OfRows = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From logits_CV of this rank's part of the vocabulary, in fp32 at least, and the places index_C that they belong to
(numbers in the flat (B, T)) to sums_SC, of which the first is the loss, and the loss's gradient by the logits (C, V).
The logits may be overwritten."""


def fused_loss(
    out: HeadInput, labels_BT: torch.Tensor, of_rows: OfRows, num_sums: int, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the loss over places with a target, sums_S of everything that `of_rows` gives, detached), in fp32 at
    least. Products are made in autocast's dtype where autocast is on, else in that of the hidden states."""
    device = out.hidden_BTD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else out.hidden_BTD.dtype
    options = _Options(out.softcap, num_sums, chunk_tokens, dtype, torch.is_grad_enabled(), out.backward_twice)
    with torch.autocast(device, enabled=False):
        return _Fused.apply(out.hidden_BTD, out.weight_VD, labels_BT, of_rows, options)


@torch.no_grad()
def logits_of(out: HeadInput, hidden_CD: torch.Tensor) -> torch.Tensor:
    """logits_CV of some rows of hidden states over this rank's part of the vocabulary, in fp32 at least."""
    return capped(hidden_CD @ out.weight_VD.to(hidden_CD.dtype).T, out.softcap)


def capped(logits_CV: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Logits of products, in fp32 at least. The products may be overwritten."""
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return logits_CV if softcap is None else logits_CV.div_(softcap).tanh_().mul_(softcap)


@dataclass(frozen=True)
class _Options:
    softcap: float | None
    num_sums: int
    chunk_tokens: int
    dtype: torch.dtype
    grad: bool
    backward_twice: bool


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_BTD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_BT: torch.Tensor,
        of_rows: OfRows,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
        weight, wide = weight_VD.to(options.dtype), torch.promote_types(options.dtype, torch.float32)
        needs = [options.grad and need for need in ctx.needs_input_grad[:2]]
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=options.dtype) if needs[0] else None
        grad_weight_VD = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        sums_S = hidden_ND.new_zeros(options.num_sums, dtype=wide)
        for index_C in chunks(labels_BT, options.chunk_tokens):
            hidden_CD = hidden_ND[index_C].to(options.dtype)
            logits_CV = capped(hidden_CD @ weight.T, options.softcap)
            slope_CV = None if options.softcap is None else 1 - (logits_CV / options.softcap).square()
            sums_SC, grad_CV = of_rows(logits_CV, index_C)
            sums_S += sums_SC.sum(1)
            if slope_CV is not None:
                grad_CV = grad_CV * slope_CV
            grad_CV = grad_CV.to(options.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[index_C] = grad_CV @ weight
            if grad_weight_VD is not None:
                grad_weight_VD.add_(grad_CV.T @ hidden_CD)
        ctx.twice = options.backward_twice
        grad_hidden_BTD = None if grad_hidden_ND is None else grad_hidden_ND.view(hidden_BTD.shape)
        ctx.grads = [(grad_hidden_BTD, hidden_BTD.dtype), (grad_weight_VD, weight_VD.dtype)]
        ctx.mark_non_differentiable(sums_S)
        return sums_S[0].clone(), sums_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, grad_sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("a fused loss keeps one set of gradients: run the forward pass again")
        if ctx.twice:
            kept = (None if g is None else (g * grad_total).to(dtype) for g, dtype in ctx.grads)
            return *kept, None, None, None
        grads, ctx.grads = ctx.grads, None  # scaled in place, and forgotten so that autograd may take the memory over
        scaled = (None if g is None else g.mul_(grad_total).to(dtype) for g, dtype in grads)
        return *scaled, None, None, None


def chunks(labels_BT: torch.Tensor, limit: int) -> tuple[torch.Tensor, ...]:
    """The places with a target (numbers in the flat (B, T)) in pieces of at most `limit`, as even as they can be: no
    last one of a few rows."""
    index_N = (labels_BT.reshape(-1) != IGNORE).nonzero()[:, 0]
    if not len(index_N):
        return ()
    return index_N.split(-(-len(index_N) // -(-len(index_N) // limit)))
