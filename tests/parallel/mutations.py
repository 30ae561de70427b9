"""Known bugs of composed parallelism, each as one change to the real code, made on the ranks while a test runs.

They are what trackers of other stacks report (Megatron-LM 7452, 844, 1446; torchtitan 2972, 4544; pytorch 149768). A
mutation whose symbol is gone fails with an AttributeError: find where that work is done now.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from truestep.numerics.axis import Axis


@dataclass(frozen=True)
class Mutation:
    """`target` is the "module:name" that `change` gets and gives another one for. `line`: a composition on which it
    must show. `reload`: it shows when a checkpoint is loaded on another mesh."""

    line: str
    target: str
    change: Callable[[Any], Any]
    reload: bool = False


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The code changed by the mutation of this name; as it is, without one."""
    if not name:
        yield
        return
    mutation = MUTATIONS[name]
    module, _, path = mutation.target.partition(":")
    *holders, last = path.split(".")
    holder = functools.reduce(getattr, holders, importlib.import_module(module))
    original = getattr(holder, last)
    setattr(holder, last, mutation.change(original))
    try:
        yield
    finally:
        setattr(holder, last, original)


def _no_sum(_: Any) -> Any:
    """Gradients that are partial over tp stay so, and copies drift apart (C32)."""
    return lambda grads: None


def _keys_not_summed(places: Any) -> Any:
    """Key and value projections that every tensor rank holds whole are taken to be finished after backward."""

    def finished(*args: Any) -> Any:
        found = places(*args)
        keys = [name for name in found if ".attention.k." in name or ".attention.v." in name]
        return found | {name: replace(found[name], missing=Axis("none")) for name in keys}

    return finished


def _everybody_owns(norm: Any) -> Any:
    """Every rank's copy of a tensor counts in the global norm (C33)."""
    return lambda grads, *rest: norm([replace(grad, owned=True) for grad in grads], *rest)


def _mean_over_ranks(divide: Any) -> Any:
    """FSDP2 takes the mean over its ranks, as it does by default."""
    return lambda module, factor: divide(module, factor * dist.get_world_size())


def _padded_vocabulary(softmax: Any) -> Any:
    """Two rows of padding, with logits 0, take part in the softmax of the last tensor rank (C30)."""

    def padded(self: Any, logits_CV: torch.Tensor, labels_C1: torch.Tensor) -> Any:
        vocab, rows = self.options.vocab, logits_CV.shape[1]
        more = 2 if vocab.rank == vocab.size - 1 else 0
        nll_C1, log_z_C1, logp_CV, hit = softmax(self, pad(logits_CV, (0, more)), labels_C1)
        return nll_C1, log_z_C1, logp_CV[:, :rows].contiguous(), hit

    return padded


MUTATIONS = {
    "partial gradients of tensor ranks not summed": Mutation("tp=2", "truestep.parallel.model:sum_missing", _no_sum),
    "gradient of shared key heads not summed": Mutation(
        "tp=2 kv_heads=1", "truestep.parallel.apply:places", _keys_not_summed
    ),
    "copies counted twice in the norm": Mutation("tp=2", "truestep.parallel.model:global_norm", _everybody_owns),
    "mean over data ranks": Mutation(
        "dp_shard=2", "torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor", _mean_over_ranks
    ),
    "padding inside the softmax": Mutation(
        "tp=2 vocab=37", "truestep.losses.cross_entropy:_Chunks._softmax", _padded_vocabulary
    ),
}
