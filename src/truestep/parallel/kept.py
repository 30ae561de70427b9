"""How many bytes autograd keeps from the forward pass of a microbatch for its backward pass: what activations cost.

Counted at the first microbatch that a part of the model computes, at the end of its forward pass; later ones pay
nothing. Parameters do not count, nor does what FSDP2 has gathered and freed by then. Copies of weights in the dtype of
autocast do: they live as long. Gradients that the fused head computes in its forward pass are no activations.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from truestep.parallel.recompute import kept_products


class Kept:
    """Bytes by number of the part; one part, number 0, where there is no pipeline."""

    def __init__(self):
        self.by_part: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Of one microbatch in all parts on this rank. A pipeline keeps those of all microbatches in flight."""
        return sum(self.by_part.values())

    def counting(self, number: int, part: nn.Module) -> AbstractContextManager[None]:
        """Around a forward pass of the part."""
        return nullcontext() if number in self.by_part else self._count(number, part)

    @contextmanager
    def _count(self, number: int, part: nn.Module) -> Iterator[None]:
        saved: WeakSet[_Saved] = WeakSet()

        def pack(tensor: torch.Tensor) -> _Saved:
            one = _Saved(tensor)
            saved.add(one)
            return one

        before = _storages(kept_products())
        with saved_tensors_hooks(pack, lambda one: one.tensor):
            yield
        found = _storages(one.tensor for one in saved) | (_storages(kept_products()) - before)
        found -= _storages(part.parameters())
        self.by_part[number] = sum(storage.nbytes() for storage in found)


class _Saved:
    """A tensor in autograd's hands: gone when autograd lets go of it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def _storages(tensors: Iterable[torch.Tensor]) -> set[torch.UntypedStorage]:
    """torch has one Python object for a storage, whichever tensor is asked for it."""
    plain = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return {tensor.untyped_storage() for tensor in plain}
