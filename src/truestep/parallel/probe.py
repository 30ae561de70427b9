"""The norm of what this rank contributes to each gradient reduction, a microbatch at a time, before the reduction.

Under FSDP2 it is read off the buffer that enters the reduce-scatter; elsewhere off each leaf's gradient as autograd
makes it (before it is added to `.grad`). Sums of squares stay on the device until `take` is called once a step.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from truestep.numerics.axis import reduce_scatter


class NormProbe:
    """Collects sums of squares; `next_microbatch` closes one microbatch, `take` returns and clears the norms."""

    def __init__(self):
        self._parts: list[torch.Tensor] = []
        self._done: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> None:
        """Count the elements of one contribution. Accumulates at least in fp32."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(x, dtype=dtype)
        self._parts.append(norm * norm)

    def next_microbatch(self) -> None:
        if self._parts:
            self._done.append(torch.stack(self._parts).sum().sqrt())
            self._parts.clear()

    def take(self) -> list[float]:
        """Norms of the microbatches since the last call, in order."""
        norms = torch.stack(self._done).tolist() if self._done else []
        self._done.clear()
        return norms


class ProbedReduceScatter(ReduceScatter):
    """FSDP2's default reduce-scatter, with its input's norm noted (the padding of uneven shards is zero)."""

    def __init__(self, probe: NormProbe):
        self._probe = probe

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op: Any, async_op: bool = False):
        self._probe.add(input_tensor)
        return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def watch_leaves(model: nn.Module, probe: NormProbe) -> None:
    """Note every leaf gradient of `model` as it is produced."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(probe.add)
