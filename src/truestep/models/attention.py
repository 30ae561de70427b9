"""The seam of core attention: `mask` is made once a microbatch for each kind of layer, `attend` called by each layer.

B rows, T queries, S keys, H query heads, G key/value heads, K head size. Keys are the last S - T cached places, then
the T of the queries. A query sees keys of its own document that are not later than itself; with a window of w, only
the last w of them (itself included). A query that sees nothing (padding) gives 0 and passes no gradient.
"""

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

Mask = torch.Tensor | BlockMask | None
"""None: plain causal. A tensor (B, 1, T, S), bool or additive floats: dense. A BlockMask: FlexAttention (CUDA)."""


def mask(
    queries_BT: torch.Tensor,
    keys_BS: torch.Tensor,
    window: int | None,
    *,
    softcap: bool,
    head_dim: int,
    dtype: torch.dtype,
) -> Mask:
    """The mask of documents_BT numbers (-1: padding) for one kind of layer.

    On CUDA without a cache the rule goes to FlexAttention, block by block (its kernels start at heads of 16 and have no
    float64); elsewhere it is a dense tensor: additive in `dtype` for the fused kernels, which would convert a bool mask
    in every layer, and bool where scores are explicit."""
    T, S = queries_BT.shape[1], keys_BS.shape[1]
    if queries_BT.is_cuda and T == S and head_dim >= 16 and dtype != torch.float64:
        return _block_mask(keys_BS, window)
    allowed = queries_BT[:, :, None] == keys_BS[:, None, :]
    allowed &= (keys_BS >= 0)[:, None, :]
    back_TS = torch.arange(S - T, S, device=keys_BS.device)[:, None] - torch.arange(S, device=keys_BS.device)
    allowed &= back_TS >= 0 if window is None else (back_TS >= 0) & (back_TS < window)
    allowed = allowed[:, None]
    if softcap:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def attend(
    q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    """softmax(cap(scale q kᵀ) + mask) v, (B, H, T, K); the softmax is at least fp32."""
    gqa = q_BHTK.shape[1] != k_BGSK.shape[1]
    if isinstance(mask, BlockMask):
        return _blockwise(q_BHTK, k_BGSK, v_BGSK, mask, scale, softcap, gqa)
    if softcap is not None:
        return _explicit(q_BHTK, k_BGSK, v_BGSK, mask, scale, softcap)
    causal = mask is None and q_BHTK.shape[2] > 1
    dense = mask if mask is None else mask.to(q_BHTK.dtype)
    return scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=dense, is_causal=causal, scale=scale, enable_gqa=gqa
    )


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """Scores in full, for soft-capping where FlexAttention has no kernel."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = torch.tanh(scores.to(torch.promote_types(q.dtype, torch.float32)) / softcap) * softcap
    if allowed is None:
        T, S = scores.shape[-2:]
        allowed = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    # a finite floor, then zeros: a row without any key gives 0 and a clean gradient, where -inf would give NaN
    weights = torch.softmax(scores.masked_fill(~allowed, torch.finfo(scores.dtype).min), dim=-1)
    return weights.masked_fill(~allowed, 0.0).to(v.dtype) @ v


def _block_mask(documents_BT: torch.Tensor, window: int | None) -> BlockMask:
    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = (q >= k) & (documents_BT[b, q] == documents_BT[b, k]) & (documents_BT[b, k] >= 0)
        return seen if window is None else seen & (q - k < window)

    rows, length = documents_BT.shape
    return _create_block_mask()(rule, rows, None, length, length, device=documents_BT.device)


def _blockwise(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float, softcap: float | None, gqa: bool
) -> Any:
    """FlexAttention is a kernel only when compiled: with the block around it, or by itself."""
    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, _capped(softcap), mask, scale, gqa)
    return _flex()(q, k, v, _kept_cap(softcap), mask, scale, gqa)


@cache
def _flex() -> Any:
    return torch.compile(flex_attention)


@cache
def _create_block_mask() -> Any:
    return torch.compile(create_block_mask)


def _capped(softcap: float | None) -> Any:
    if softcap is None:
        return None

    def cap(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return torch.tanh(score / softcap) * softcap

    return cap


_kept_cap = cache(_capped)  # one function a cap: a new one each call would be compiled anew
