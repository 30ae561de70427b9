"""A model that was made parallel, as the step sees it: run it on microbatches, complete its gradients, update it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from truestep.numerics.batch import Batch
from truestep.numerics.pieces import Piece, piece_of
from truestep.parallel.groups import Groups
from truestep.parallel.layout import Place
from truestep.parallel.probe import NormProbe
from truestep.parallel.reduce import global_norm, sum_missing

LossOf = Callable[[Batch], Callable[[Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]]
"""From a microbatch (this rank's part of its rows) to what the model's head computes: the loss sum, and metrics."""


@dataclass
class Parallel:
    """A model ready for the step. `call` is what the step runs; `bare` owns the parameters and their names."""

    bare: nn.Module
    call: nn.Module
    groups: Groups
    dtype: torch.dtype
    device: torch.device
    places: dict[str, Place] = field(default_factory=dict)
    probe: NormProbe = field(default_factory=NormProbe)
    _locals: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def sharded(self) -> bool:
        return isinstance(self.bare, FSDPModule)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold whole copies as plain tensors (DDP)."""
        return self.groups.world.group if isinstance(self.call, DistributedDataParallel) else None

    @property
    def counts(self) -> bool:
        """Whether this rank's loss sums count: of ranks that compute the same ones, one does."""
        return self.groups.axes.tp.rank == 0 and self.groups.pp.rank == self.groups.pp.size - 1

    def compute(self) -> AbstractContextManager:
        """The precision that forward runs in: master weights stay as they are, products are of `dtype`."""
        if self.dtype in (torch.float32, torch.float64):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def microbatch(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of one microbatch. Only the last one of a step crosses the replicate axis."""
        if isinstance(self.call, FSDPModule):
            if self.groups.degrees.dp_replicate > 1:
                self.call.set_requires_all_reduce(last)
            return nullcontext()
        if isinstance(self.call, DistributedDataParallel) and not last:
            return self.call.no_sync()
        return nullcontext()

    def run(
        self, batches: list[Batch], loss_of: LossOf, factor: float, begin: Callable[[int], None]
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Forward and backward of every microbatch, each loss sum times `factor`. `begin(index)` is called before each.
        Returns the loss sums and the sums of the metrics; they are zero where this rank does not count."""
        sums: list[torch.Tensor] = []
        metrics: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(batches):
            begin(index)
            batch = batch.to(self.device)
            with self.microbatch(last=index == len(batches) - 1):
                with self.compute():
                    loss_sum, extra = forward(self.call, batch, loss_of(batch))
                if factor:
                    (loss_sum * factor).backward()
            self.probe.next_microbatch()
            count = 1.0 if self.counts else 0.0
            sums.append(loss_sum.detach() * count)
            metrics = {name: value.detach() * count + metrics.get(name, 0) for name, value in extra.items()}
        return sums, metrics

    def own_part(self, batch: Batch) -> Batch:
        """The places of a microbatch's rows that this rank computes."""
        return batch

    def evaluate(self, batch: Batch, head: Callable[[Any], torch.Tensor]) -> torch.Tensor | None:
        """The result of `head` on one microbatch, without gradients; None where this rank does not have the head."""
        with torch.no_grad(), self.compute():
            return forward(self.call, batch.to(self.device), head)

    def complete_gradients(self) -> None:
        """After the last backward pass: sum what is still partial over axes that FSDP2 does not know."""
        parameters = self.bare.named_parameters()
        with torch.no_grad():
            sum_missing(
                (local(_gradient(parameter)), self.places[name].missing)
                for name, parameter in parameters
                if parameter.requires_grad and self.places[name].missing.size > 1
            )

    def grad_norm(self) -> torch.Tensor:
        """2-norm of the whole model's gradient: scalar float64, the same on every rank."""
        return global_norm(self.gradients().values(), self.groups.world, self.device)

    def gradients(self) -> dict[str, Piece]:
        """What this rank holds of the gradients."""
        named = self.bare.named_parameters()
        return {name: self.places[name].piece(p.grad) for name, p in named if p.grad is not None}

    def pieces(self) -> dict[str, Piece]:
        """What this rank holds of the parameters and of the buffers that persist."""
        held = {name: self.places[name].piece(parameter) for name, parameter in self.bare.named_parameters()}
        kept = self.bare.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.bare.named_buffers() if name in kept}
        first = self.groups.stage.rank == 0
        return held | {name: piece_of(buffer).owned_if(first) for name, buffer in buffers.items()}

    def locals(self) -> dict[str, nn.Parameter]:
        """Parameters as plain tensors of what this rank holds, over the same memory: what an optimizer works on."""
        if not self._locals:
            named = self.bare.named_parameters()
            self._locals = {
                name: nn.Parameter(p.to_local(), p.requires_grad) if isinstance(p, DTensor) else p for name, p in named
            }
        return self._locals

    def hand_over_gradients(self) -> list[torch.Tensor]:
        """Give the gradients to the `locals`; returns them."""
        grads = []
        for name, parameter in self.bare.named_parameters():
            mine = self.locals()[name]
            if parameter is not mine:
                mine.data = local(parameter.detach())  # FSDP2 may have moved it (padding) at its first use
                mine.grad = None if parameter.grad is None else local(parameter.grad)
            if mine.grad is not None:
                grads.append(mine.grad)
        return grads

    def zero_grad(self) -> None:
        for name, parameter in self.bare.named_parameters():
            parameter.grad = self.locals()[name].grad = None


def forward(model: nn.Module, batch: Batch, head: Any) -> Any:
    """Run the model on a batch; `head` turns its HeadInput into the result."""
    return model(batch.tokens_BT, batch.positions_BT, batch.documents_BT, head=head, labels_BT=batch.labels_BT)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient, made zero where there is none (every rank of an axis takes part in its sums)."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
