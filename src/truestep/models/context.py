"""Core attention of rows that the ranks of the context axis share, each having some columns of every row.

Two styles, each a `Core` that stands in for `attend`:

* all-gather: keys and values of whole rows come to every rank. Its queries are one or two contiguous chunks, and each
  chunk is ordinary attention behind a cache: its keys are the places of the row up to its own end.
* Ulysses (arXiv 2309.14509): tokens are exchanged for heads, so that a rank has whole rows of some heads.

No rank ever holds queries, results or scores of another rank's tokens for all heads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from truestep.errors import UserError
from truestep.models.attention import Mask, attend, kv_share, row_mask
from truestep.models.router import is_recomputation
from truestep.numerics.axis import Axes, Axis, gathered, summed_part


class Chunk:
    """`queries` (places in this rank's part) see `keys` (places in the row), by a mask as of `attention.mask`. No
    dataclass (see LayerInput)."""

    def __init__(self, queries: slice, keys: slice, mask: Mask):
        self.queries = queries
        self.keys = keys
        self.mask = mask


Rule = Mask | list[Chunk]
Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, float, float | None], torch.Tensor]
"""(q, k, v, rule, scale, softcap) -> mixed values of this rank's tokens, shaped as in `attend`."""


def core_of(axes: Axes) -> Core:
    """The core attention of a rank."""
    if axes.cp.size == 1:
        return attend
    return partial(_attend_gathered if axes.context.style == "all-gather" else _attend_exchanged, axes)


def rule_of(axes: Axes, documents_BS: torch.Tensor | None, length: int, window: int | None, **options: Any) -> Rule:
    """What `core_of(axes)` needs for rows of `length` tokens; `options` are those of `row_mask`."""
    if axes.cp.size == 1 or axes.context.style == "ulysses":
        return row_mask(documents_BS, range(length), window, **options)[1]
    chunks, done = [], 0
    for places in axes.columns(length):
        keys, mask = row_mask(documents_BS, places, window, **options)
        chunks.append(Chunk(slice(done, done + len(places)), slice(keys.start, keys.stop), mask))
        done += len(places)
    return chunks


def _attend_gathered(
    axes: Axes,
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    chunks: list[Chunk],
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    own = torch.cat((k_BGTK, v_BGTK), dim=-1)  # one collective for both
    whole = _Whole.apply(own, axes)
    assert isinstance(whole, torch.Tensor)
    k, v = whole.split((k_BGTK.shape[-1], v_BGTK.shape[-1]), dim=-1)
    mixed = [attend(q_BHTK[:, :, c.queries], k[:, :, c.keys], v[:, :, c.keys], c.mask, scale, softcap) for c in chunks]
    mixed = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return mixed
    return _Release.apply(mixed, own, whole, axes)  # pyright: ignore[reportReturnType]


class _Whole(torch.autograd.Function):
    """Parts of all ranks along T in the order of the row; backward gives each rank the sum for its own part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, axes: Axes) -> torch.Tensor:
        ctx.axes = axes
        return _in_row_order(own, axes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own_sum(grads[0], ctx.axes), None


class _Release(torch.autograd.Function):
    """Identity on `mixed`. The memory of `whole` is given back once attention has used it and filled anew before the
    backward pass of attention, so that between the two a rank holds keys and values of its own tokens only. What is
    recomputed is used at once, and stays."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, own: torch.Tensor, whole: torch.Tensor, axes: Axes) -> torch.Tensor:
        ctx.save_for_backward(own, whole)
        ctx.axes, ctx.num_bytes = axes, whole.untyped_storage().nbytes()
        if not is_recomputation():
            whole.untyped_storage().resize_(0)
        return mixed.view_as(mixed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own, whole = ctx.saved_tensors
        storage = whole.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(ctx.num_bytes)
            whole.data.copy_(_in_row_order(own, ctx.axes))  # .data: these are the values that attention saved
        return grads[0], None, None, None


def _in_row_order(own: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Plain all-gather along dim 2."""
    parts = gathered(own, axes.cp, 2)
    order = axes.order
    if order == sorted(order):
        return parts.contiguous()
    by_place = sorted(zip(order, parts.chunk(len(order), 2)), key=lambda pair: pair[0])
    return torch.cat([part for _, part in by_place], dim=2)


def _own_sum(whole: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Plain reduce-scatter along dim 2 of what is in the order of the row."""
    parts = whole.chunk(len(axes.order), 2)
    return summed_part(torch.cat([parts[place] for place in axes.order], dim=2), axes.cp, 2)


def _attend_exchanged(
    axes: Axes,
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    cp, heads = axes.cp, q_BHTK.shape[1]
    if heads % cp.size:
        raise UserError(f"Ulysses cannot share {heads} heads of a rank over cp = {cp.size}; take style all-gather")
    own, group = heads // cp.size, heads // k_BGTK.shape[1]
    queries = [range(rank * own, (rank + 1) * own) for rank in range(cp.size)]
    shares = [kv_share(mine, group) for mine in queries]
    q = _to_heads(q_BHTK, queries, cp)
    kv = _to_heads(torch.cat((k_BGTK, v_BGTK), dim=-1), [needed for needed, _ in shares], cp)
    of_query = shares[cp.rank][1]
    kv = kv if of_query is None else kv[:, of_query]
    k, v = kv.split((k_BGTK.shape[-1], v_BGTK.shape[-1]), dim=-1)
    return _to_tokens(attend(q, k, v, mask, scale, softcap), cp)


def _to_heads(x_BHTK: torch.Tensor, heads: Sequence[range], cp: Axis) -> torch.Tensor:
    """From all heads of own tokens to the `heads` of each rank (which may overlap) of whole rows."""
    sent = [len(of_rank) for of_rank in heads]
    parts = [x_BHTK[:, of_rank.start : of_rank.stop] for of_rank in heads]
    rows = cp.exchange(torch.cat(parts, dim=1).transpose(0, 1), [sent[cp.rank]] * cp.size, sent)
    return rows.unflatten(0, (cp.size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)


def _to_tokens(x_BHSK: torch.Tensor, cp: Axis) -> torch.Tensor:
    """From own heads of whole rows to all heads of own tokens."""
    sent = [x_BHSK.shape[1]] * cp.size
    rows = x_BHSK.unflatten(2, (cp.size, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)
    return cp.exchange(rows, sent, sent).transpose(0, 1)
