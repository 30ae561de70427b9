"""A moving average of the weights, which a stage may end with instead of the last ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from truestep.numerics.pieces import Piece
from truestep.parallel.model import Parallel, local


@dataclass
class Average:
    """e, which begins as the weights w of the stage's start; every update makes it d·e + (1 - d)·w, d being the decay.

    `values`: of every trained parameter what this rank holds, in the parameter's dtype (fp32 masters)."""

    decay: float
    parallel: Parallel
    values: dict[str, torch.Tensor]

    @staticmethod
    def of(parallel: Parallel, decay: float) -> "Average":
        named = parallel.named_parameters().items()
        values = {name: local(p.detach()).clone() for name, p in named if p.requires_grad}
        return Average(decay, parallel, values)

    @torch.no_grad()
    def update(self) -> None:
        """The optimizer has taken a step."""
        torch._foreach_lerp_(list(self.values.values()), self._weights(), 1 - self.decay)

    def pieces(self) -> dict[str, Piece]:
        """The model with averages in place of weights, as `Parallel.pieces` gives it."""
        held = self.parallel.pieces()
        return held | {name: replace(held[name], local=value) for name, value in self.values.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the average; afterwards its weights are what they were, to the bit. No one else may
        read or write them meanwhile."""
        self.parallel.pieces()  # gives up whole parameters that FSDP2 holds from an evaluation
        self._exchange()
        try:
            yield
        finally:
            self.parallel.pieces()
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, value in zip(self._weights(), self.values.values(), strict=True):
            kept = weight.clone()
            weight.copy_(value)
            value.copy_(kept)
        self.parallel.updated()

    def _weights(self) -> list[torch.Tensor]:
        named = self.parallel.named_parameters()
        return [local(named[name].detach()) for name in self.values]
