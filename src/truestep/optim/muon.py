"""Muon for matrices, sharded or not: momentum stays sharded, each whole matrix is orthogonalised by one rank.

For a matrix W with gradient G, momentum μ and rate η (Keller Jordan, 2024):

    B <- μB + (1 - μ)G;  D = (1 - μ)G + μB  (Nesterov);  W <- (1 - η·decay)·W - η·√max(1, rows / columns)·orthogonal(D)

which is the original scaling, made for rates near 0.02. Since a matrix is always orthogonalised whole, and by one rank,
the update has the same bits at every degree of sharding, and no work is done twice: the ranks of the whole mesh,
replicas too, share the matrices by cost.
"""

from math import sqrt
from typing import Any

import torch
import torch.distributed as dist

from truestep.numerics.precision import DTYPES
from truestep.optim.clip import local
from truestep.optim.newton_schulz import cost, orthogonalise
from truestep.optim.owners import Home, buckets, home_of


class Muon(torch.optim.Optimizer):
    """`dtype`: of the Newton-Schulz products and of what travels; "auto" is bfloat16 on GPUs that have it, else
    float32. `replicas`: the ranks that hold copies of plain tensors. State: "momentum_buffer", sharded like the
    parameter."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        momentum: float,
        num_iterations: int,
        dtype: str,
        replicas: dist.ProcessGroup | None = None,
    ):
        super().__init__(groups, {"lr": 0.02, "weight_decay": 0.0})
        self._momentum, self._num_iterations = momentum, num_iterations
        params = [param for group in self.param_groups for param in group["params"]]
        self._dtype = _resolve(dtype, params[0])
        self._homes: dict[Home, list[torch.Tensor]] = {}
        for param in params:
            self.state[param] = {"momentum_buffer": torch.zeros_like(param, memory_format=torch.preserve_format)}
            self._homes.setdefault(home_of(param, replicas), []).append(param)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        group_of = {id(param): group for group in self.param_groups for param in group["params"]}
        for home, params in self._homes.items():
            with_grad = [param for param in params if param.grad is not None]
            for bucket in buckets([param.shape for param in with_grad], home.num_ranks, cost):
                self._step_bucket(home, [(with_grad[i], owner) for i, owner in bucket], group_of)

    def _step_bucket(self, home: Home, owned: list[tuple[torch.Tensor, int]], group_of: dict[int, dict]) -> None:
        directions = [self._direction(param).to(self._dtype) for param, _ in owned]
        matrices = [home.matrix(param, owner) for param, owner in owned]
        updates = home.on_owners(matrices, directions, lambda x: orthogonalise(x, self._num_iterations, self._dtype))
        for (param, _), update in zip(owned, updates, strict=True):
            group = group_of[id(param)]
            rows, columns = param.shape
            weight = local(param)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update, alpha=-group["lr"] * sqrt(max(1.0, rows / columns)))

    def _direction(self, param: torch.Tensor) -> torch.Tensor:
        """This rank's part of D, after moving the momentum."""
        assert param.grad is not None
        grad, buffer = local(param.grad), local(self.state[param]["momentum_buffer"])
        buffer.lerp_(grad, 1 - self._momentum)
        return grad.lerp(buffer, self._momentum)


def _resolve(dtype: str, param: torch.Tensor) -> torch.dtype:
    if dtype == "auto":
        bf16 = param.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else param.dtype
    return DTYPES[dtype]
