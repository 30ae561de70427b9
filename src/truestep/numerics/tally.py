"""Observers that count what a step costs: floating-point operations, and collectives with their bytes."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from truestep.numerics.trace import in_backward, tensors_in
from truestep.recipe.model import attention_pairs

aten = torch.ops.aten


class Flops:
    """Floating-point operations by the rule of the recipe's counts (COUNTING_RULE): matrix products, and attention by
    its query-key pairs, causal ones counted causally; attention's backward is twice its forward. Recomputation in the
    backward pass is counted apart; padding that is computed is counted."""

    def __init__(self):
        self.forward, self.backward, self.recomputed = 0, 0, 0

    def see(self, op: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        count = _FORMULAS.get(op._schema.name)
        if count is None:
            return
        flops = count(args, kwargs)
        if in_backward() < 0:
            self.forward += flops
        elif torch.is_grad_enabled():  # only recomputation records a graph inside a backward pass
            self.recomputed += flops
        else:
            self.backward += flops

    def begin(self) -> None:
        self.__init__()


def _product(at: int) -> Callable[[tuple, dict], int]:
    """2 m k n for each matrix of two operands (..., m, k) and (..., k, n), the first of them argument `at`."""

    def count(args: tuple, kwargs: dict) -> int:
        a, b = args[at], args[at + 1]
        return 2 * a.numel() * b.shape[-1]

    return count


def _grouped(args: tuple, kwargs: dict) -> int:
    """Rows in groups (2-D) times a matrix for each group (3-D), or a product over the rows of each group (both 2-D)."""
    a, b = args[0], args[1]
    if a.ndim == 2:
        return 2 * a.numel() * b.shape[-1]
    return 2 * b.numel() * a.shape[-2]


def _attention(at: int, causal_at: int, times: int) -> Callable[[tuple, dict], int]:
    """Query, key and value are arguments `at` and following, (B, H, T, K), (B, G, S, K) and (B, G, S, V)."""

    def count(args: tuple, kwargs: dict) -> int:
        q, k, v = args[at : at + 3]
        causal = kwargs.get("is_causal", args[causal_at] if len(args) > causal_at else False)
        queries, keys = q.shape[2], k.shape[2]
        pairs = attention_pairs(queries) if causal and queries == keys else queries * keys
        return times * q.shape[0] * q.shape[1] * 2 * (q.shape[3] + v.shape[3]) * pairs

    return count


_FORMULAS: dict[str, Callable[[tuple, dict], int]] = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::addmm_": _product(1),
    "aten::baddbmm": _product(1),
    "aten::_scaled_mm": _product(0),
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(0, 4, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 7, 2),
    "aten::_scaled_dot_product_flash_attention": _attention(0, 4, 1),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(1, 10, 2),
    "aten::_scaled_dot_product_efficient_attention": _attention(0, 6, 1),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(1, 11, 2),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, 6, 1),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, 13, 2),
}


class Collective(NamedTuple):
    """`kind` is all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, send, receive, ...; `axis` names the
    ranks that take part."""

    kind: str
    axis: str


class Collectives:
    """Collectives by kind and axis: how many, and how many bytes: those of the larger of what this rank puts in and
    takes out (the whole tensor of an all-gather, an all-reduce and a reduce-scatter)."""

    def __init__(self, axis_of: Callable[[dist.ProcessGroup], str]):
        self._axis_of = axis_of
        self.count: Counter[Collective] = Counter()
        self.bytes: Counter[Collective] = Counter()

    def see(self, op: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        kind = _KINDS.get(op._schema.name)
        if kind is None:
            return
        named = dict(zip((argument.name for argument in op._schema.arguments), args)) | kwargs
        key = Collective(kind, self._axis_of(_group(named)))
        self.count[key] += 1
        self.bytes[key] += _bytes(named, out)

    def begin(self) -> None:
        self.count.clear()
        self.bytes.clear()


def _group(named: Mapping[str, Any]) -> dist.ProcessGroup:
    if "group_name" in named:
        return dist.distributed_c10d._resolve_process_group(named["group_name"])
    return dist.ProcessGroup.unbox(named["process_group"])


def _bytes(named: Mapping[str, Any], out: Any) -> int:
    """Outputs are among the arguments of the operators that work in place, and among the results of the others."""
    sizes = [sum(x.nbytes for x in tensors_in(value)) for value in named.values()]
    return max([*sizes, sum(x.nbytes for x in tensors_in(out))])


_KINDS = {
    f"{space}::{name}": kind
    for space, names in {
        "c10d": {
            "all-reduce": ["allreduce_", "allreduce_coalesced_"],
            "all-gather": [
                "allgather_",
                "_allgather_base_",
                "allgather_coalesced_",
                "allgather_into_tensor_coalesced_",
            ],
            "reduce-scatter": ["reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"],
            "all-to-all": ["alltoall_", "alltoall_base_"],
            "broadcast": ["broadcast_"],
            "reduce": ["reduce_"],
            "gather": ["gather_"],
            "scatter": ["scatter_"],
            "send": ["send"],
            "receive": ["recv_", "recv_any_source_"],
            "barrier": ["barrier"],
        },
        "_c10d_functional": {
            "all-reduce": ["all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"],
            "all-gather": ["all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"],
            "reduce-scatter": ["reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"],
            "all-to-all": ["all_to_all_single"],
            "broadcast": ["broadcast", "broadcast_"],
        },
    }.items()
    for kind, spellings in names.items()
    for name in spellings
}
