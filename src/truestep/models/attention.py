"""The seam of core attention: `mask` is made once a microbatch for each kind of layer, `attend` called by each layer.

B rows, T queries, S keys, H query heads, G key/value heads, K head size. Keys are S - T places before the queries
(of a cache, or of a row of which the queries are a part), then the T of the queries. A query sees keys of its own
document that are not later than itself; with a window of w, only the last w of them (itself included). A query that
sees nothing (padding) gives 0 and passes no gradient.
"""

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

Mask = torch.Tensor | BlockMask | None
"""None: plain causal, T = S. A tensor (B or 1, 1, T, S), bool or additive floats: dense. A BlockMask: FlexAttention, on
CUDA."""


def row_mask(
    documents_BS: torch.Tensor | None,
    queries: range,
    window: int | None,
    *,
    device: torch.device,
    softcap: bool,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[range, Mask]:
    """The keys that some `queries` (places of the row) can see, and the mask between them; without documents every row
    is one. Later keys are left out, and so are those before the window of the first query."""
    first = 0 if window is None else max(0, queries.start - window + 1)
    keys = range(first, queries.stop)
    if documents_BS is None:
        blocks = device.type == "cuda" and softcap
        if len(keys) == len(queries) and (window is None or window >= len(keys)) and not blocks:
            return keys, None
        documents_BS = torch.zeros(1, queries.stop, dtype=torch.int32, device=device)
    of_queries, of_keys = (documents_BS[:, places.start : places.stop] for places in (queries, keys))
    return keys, mask(of_queries, of_keys, window, softcap=softcap, head_dim=head_dim, dtype=dtype)


def kv_share(queries: range, group: int) -> tuple[range, list[int] | None]:
    """The key/value heads that some query heads need, where each serves `group` of them, and which of those each query
    head takes: None where each serves equally many, as kernels for grouped queries have it."""
    needed = range(queries.start // group, (queries.stop - 1) // group + 1)
    taken = [query // group - needed.start for query in queries]
    even = len({taken.count(head) for head in range(len(needed))}) == 1
    return needed, None if even else taken


def mask(
    queries_BT: torch.Tensor,
    keys_BS: torch.Tensor,
    window: int | None,
    *,
    softcap: bool,
    head_dim: int,
    dtype: torch.dtype,
    cached: bool = False,
) -> Mask:
    """The mask of documents_BT numbers (-1: padding) for one kind of layer. `cached`: the keys before those of the
    queries come from a cache, which grows.

    On CUDA without a cache the rule goes to FlexAttention, block by block (its kernels start at heads of 16 and have no
    float64); elsewhere it is a dense tensor: additive in `dtype` for the fused kernels, which would convert a bool mask
    in every layer, and bool where scores are explicit."""
    T, S = queries_BT.shape[1], keys_BS.shape[1]
    if queries_BT.is_cuda and (T == S or not cached) and head_dim >= 16 and dtype != torch.float64:
        return _block_mask(queries_BT, keys_BS, window)
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


def _block_mask(queries_BT: torch.Tensor, keys_BS: torch.Tensor, window: int | None) -> BlockMask:
    (rows, T), S = queries_BT.shape, keys_BS.shape[1]
    offset = S - T

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        back = q + offset - k
        seen = (back >= 0) & (queries_BT[b, q] == keys_BS[b, k]) & (keys_BS[b, k] >= 0)
        return seen if window is None else seen & (back < window)

    return _create_block_mask()(rule, rows, None, T, S, device=keys_BS.device)


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
