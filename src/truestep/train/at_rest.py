"""Memory that nobody may change for a while: digests at the beginning and at the end of that while.

A share of everything is looked at each time, another one every time, so that all of it has had its turn after 1 / share
times. What is found is evidence against this rank's own memory, and needs no other witness.
"""

import math
from collections.abc import Callable, Mapping

import torch

from truestep.numerics.fingerprint import fingerprint

Tensors = Callable[[], Mapping[str, torch.Tensor]]
Rows = tuple[str, int, int]
"""Name of a tensor, first row and the one behind the last, of the matrix that its last dimension makes of it."""


class AtRest:
    """`tensors` gives what lies in memory, the same names with the same shapes every time between two digests."""

    def __init__(self, tensors: Tensors, share: float):
        self._tensors = tensors
        self._windows = math.ceil(1 / share) if share > 0 else 0
        self._rows: list[Rows] = []
        self._before: torch.Tensor | None = None
        self._differs: torch.Tensor | None = None

    def leave(self, turn: int, *, everything: bool = False) -> None:
        """The while begins. `turn` decides which share is looked at."""
        tensors = self._tensors()
        windows = 1 if everything else self._windows
        self._rows = window(tensors, turn % windows, windows) if windows else []
        self._before = self._digests(tensors)
        self._differs = None

    def find(self) -> None:
        """The while ends. Nothing waits for the device."""
        if self._before is not None:
            self._differs = self._digests(self._tensors()) != self._before
            self._before = None

    def forget(self) -> None:
        """What was left has been changed on purpose."""
        self._before = self._differs = None

    def changed(self) -> list[str]:
        """Names of what is not as it was left."""
        if self._differs is None or not bool(self._differs.any()):
            return []
        return [name for (name, _, _), differs in zip(self._rows, self._differs.tolist()) if differs]

    def _digests(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if not self._rows:
            return None
        found = [fingerprint(matrix(tensors[name])[first:stop]) for name, first, stop in self._rows]
        return torch.stack([each.to(found[0].device) for each in found])


def window(tensors: Mapping[str, torch.Tensor], number: int, count: int) -> list[Rows]:
    """The rows that hold one of `count` equal windows of all elements. Every element is in one of them at least."""
    total = sum(tensor.numel() for tensor in tensors.values())
    start, stop = number * total // count, (number + 1) * total // count
    found, at = [], 0
    for name, tensor in tensors.items():
        first, last = max(start - at, 0), min(stop - at, tensor.numel())
        at += tensor.numel()
        if first < last:
            width = tensor.shape[-1] if tensor.dim() else 1
            found.append((name, first // width, -(-last // width)))
    return found


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as rows of its last dimension."""
    return tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
