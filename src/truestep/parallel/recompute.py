"""Activation checkpointing of blocks: what the backward pass needs is computed again there (arXiv 1604.06174)."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
_KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    aten._scaled_mm_v2.default,  # of torch.nn.functional.scaled_mm
}


def recompute(blocks: nn.Module, mode: str | Mapping[int, str], compiled: bool) -> None:
    """Recompute blocks in the backward pass, all in one mode or each, by its number, in its own: "full"; "selective"
    keeps the results of matrix products and redoes the rest; "none". `compiled`: the blocks will be, and the compiler
    knows torch's own way of keeping only."""
    for number, block in blocks.named_children():
        chosen = mode if isinstance(mode, str) else mode[int(number)]
        if chosen != "none":
            selective = partial(create_selective_checkpoint_contexts, _keep_products) if compiled else _contexts
            options = {"context_fn": selective} if chosen == "selective" else {}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple["_Keep", "_Recall"]:
    """Unlike torch's own, for blocks that run backward twice (zero-bubble pipelines do inputs and weights apart), and
    that do something else besides when they are computed again (routers count their tokens once)."""
    kept: dict[Any, list[torch.Tensor]] = defaultdict(list)
    recall = _Recall(kept)
    _recalls.add(recall)
    return _Keep(kept), recall


def kept_products() -> Iterator[torch.Tensor]:
    """What "selective" keeps at this moment for backward passes to come; autograd's hooks do not see it."""
    return (result for recall in _recalls for results in recall.kept.values() for result in results)


class _Keep(TorchDispatchMode):
    """In the forward pass: keep the results of matrix products, by operator in the order of their calls."""

    def __init__(self, kept: dict[Any, list[torch.Tensor]]):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op in _KEPT:
            self.kept[op].append(result.detach())
        return result


class _Recall(TorchDispatchMode):
    """When a block is computed again: take what was kept."""

    def __init__(self, kept: dict[Any, list[torch.Tensor]]):
        super().__init__()
        self.kept = kept
        self.calls: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> "_Recall":
        self.calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op not in _KEPT:
            return op(*args, **(kwargs or {}))
        self.calls[op] += 1
        return self.kept[op][self.calls[op] - 1].detach()


_recalls: WeakSet[_Recall] = WeakSet()
