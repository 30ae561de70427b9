"""Muon for matrices, wherever their parts lie: momentum lies where the parameter does, each whole matrix is
orthogonalised by one rank.

For a matrix W with gradient G, momentum μ and rate η (Keller Jordan, 2024):

    B <- μB + (1 - μ)G;  D = (1 - μ)G + μB  (Nesterov);  W <- (1 - η·decay)·W - η·√max(1, rows / columns)·orthogonal(D)

which is the original scaling, made for rates near 0.02. A parameter of three dimensions is a stack of matrices (one an
expert), to each of which this is done by itself. Since a matrix is always orthogonalised whole, and by one rank, the
update has the same bits on every mesh that gives the same gradients, and no work is done twice: all ranks that hold
parts, replicas too, share the matrices by cost.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist

from truestep.numerics.boxes import Layout
from truestep.numerics.precision import DTYPES
from truestep.optim.newton_schulz import cost, orthogonalise, orthogonalise_stacks
from truestep.optim.owners import Run, Task, buckets, on_owners, runs_of


class Muon(torch.optim.Optimizer):
    """Parameters are plain tensors of what this rank holds; `layouts` say in their order where that lies in the whole,
    on each rank of `group`. All of these ranks step together, with gradients of the same parameters.

    `dtype`: of the Newton-Schulz products and of what travels; "auto" is bfloat16 on GPUs that have it, else the
    parameters'. State: "momentum_buffer", of the parameter's shape."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        layouts: Sequence[Layout],
        momentum: float,
        num_iterations: int,
        dtype: str,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__(groups, {"lr": 0.02, "weight_decay": 0.0})
        self._momentum, self._num_iterations, self._group = momentum, num_iterations, group
        self._rank, self._num_ranks = (group.rank(), group.size()) if group else (0, 1)
        pairs = [(param, options) for options in self.param_groups for param in options["params"]]
        self._params, self._options = [param for param, _ in pairs], [options for _, options in pairs]
        self._dtype = _resolve(dtype, self._params[0])
        self._runs = [runs_of(layout) for layout in layouts]
        self._starts = [layout.boxes[self._rank].offsets[0] for layout in layouts]
        self._planned: tuple[list[int], list[list[Task]]] = [], []
        for param, layout in zip(self._params, layouts, strict=True):
            assert tuple(param.shape) == layout.boxes[self._rank].sizes, (param.shape, layout.boxes[self._rank])
            self.state[param] = {"momentum_buffer": torch.zeros_like(param, memory_format=torch.preserve_format)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        moving = [tensor for tensor, param in enumerate(self._params) if param.grad is not None]
        for tensor in moving:
            param = self._params[tensor]
            self.state[param]["momentum_buffer"].lerp_(param.grad, 1 - self._momentum)
        for bucket in self._buckets(moving):
            self._step_bucket(bucket)

    def _buckets(self, moving: list[int]) -> list[list[Task]]:
        if self._planned[0] != moving:
            runs = [(tensor, run) for tensor in moving for run in self._runs[tensor]]
            self._planned = moving, buckets(runs, self._num_ranks, cost)
        return self._planned[1]

    def _step_bucket(self, bucket: list[Task]) -> None:
        parts = [self._direction(task) if self._rank in task.run.held else None for task in bucket]
        like = self._params[0].new_empty(0, dtype=self._dtype)
        on_owners(bucket, parts, self._orthogonalise, like, self._group)
        for task, update in zip(bucket, parts, strict=True):
            if update is not None:
                options = self._options[task.tensor]
                rows, columns = task.run.shape[-2:]
                weight = self._own(self._params[task.tensor], task.tensor, task.run)
                weight.mul_(1 - options["lr"] * options["weight_decay"])
                weight.add_(update, alpha=-options["lr"] * sqrt(max(1.0, rows / columns)))

    def _direction(self, task: Task) -> torch.Tensor:
        """This rank's part of D."""
        param = self._params[task.tensor]
        assert param.grad is not None
        kept = param.grad, self.state[param]["momentum_buffer"]
        grad, buffer = (self._own(x, task.tensor, task.run) for x in kept)
        return grad.lerp(buffer, self._momentum).to(self._dtype)

    def _own(self, local: torch.Tensor, tensor: int, run: Run) -> torch.Tensor:
        """This rank's part of a run."""
        if local.ndim == 2:
            return local
        return local.narrow(0, run.first - self._starts[tensor], run.shape[0])

    def _orthogonalise(self, wholes: list[torch.Tensor]) -> None:
        for matrix in (x for x in wholes if x.ndim == 2):
            matrix.copy_(orthogonalise(matrix, self._num_iterations, self._dtype))
        orthogonalise_stacks([x for x in wholes if x.ndim == 3], self._num_iterations, self._dtype)


def _resolve(dtype: str, param: torch.Tensor) -> torch.dtype:
    if dtype == "auto":
        bf16 = param.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else param.dtype
    return DTYPES[dtype]
