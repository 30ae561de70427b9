"""A model that was made parallel, as the step sees it: run it on microbatches, complete its gradients, update it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from truestep.numerics.axis import Axis
from truestep.numerics.batch import Batch
from truestep.numerics.low_precision.draws import Draws
from truestep.numerics.pieces import Piece, piece_of
from truestep.parallel.groups import Groups
from truestep.parallel.kept import Kept
from truestep.parallel.layout import Place
from truestep.parallel.pipeline import Pipeline
from truestep.parallel.probe import GradientProbe
from truestep.parallel.reduce import global_norm, sum_missing
from truestep.parallel.wire import Wire

MIRROR = "head_mirror"
"""Name of the parameter that is the copy of a tied table in the last part of a pipeline."""

LossOf = Callable[[Batch], Callable[[Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]]
"""From a microbatch (this rank's part of its rows) to what the model's head computes: the loss sum, and metrics."""


@dataclass
class Mirror:
    """The table of a tied head that lies in another part of the pipeline than the embedding: a copy of its own memory,
    kept equal. `owner`, `copy`: the parameters, where this rank has them; `axis`: the pipeline; `ranks`: of the two."""

    owner: nn.Parameter | None
    copy: nn.Parameter | None
    axis: Axis
    ranks: tuple[int, int]

    def bring_gradient(self) -> None:
        """Add the copy's gradient to the owner's."""
        if not any(parameter.requires_grad for parameter in (self.owner, self.copy) if parameter is not None):
            return
        there = None if self.copy is None else local(_gradient(self.copy))
        if self.owner is None:
            _move(there, self.axis, *reversed(self.ranks))
            return
        here = local(_gradient(self.owner))
        if there is None:
            there = torch.empty_like(here)
            _move(there, self.axis, *reversed(self.ranks))
        here.add_(there)

    def bring_values(self) -> None:
        """Make the copy equal to the owner."""
        with torch.no_grad():
            here, there = (None if p is None else local(p.detach()) for p in (self.owner, self.copy))
            if here is not None and there is not None:
                there.copy_(here)
            elif (moved := here if there is None else there) is not None:
                _move(moved, self.axis, *self.ranks)


def _move(tensor: torch.Tensor | None, axis: Axis, source: int, target: int) -> None:
    """Send the tensor of rank `source` of an axis into that of rank `target`. For the others there is nothing to do."""
    if tensor is None:
        return
    operation, peer = (dist.isend, target) if axis.rank == source else (dist.irecv, source)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=axis.group, group_peer=peer)]):
        work.wait()


@dataclass
class Parallel:
    """A model ready for the step: `parts` are the modules that this rank holds of it, one without a pipeline. Names
    are those of the whole model. `call` is what runs where there is one part: the part, or DDP around it. `kept`: what
    autograd keeps of a microbatch on this rank. `after_backward` is called after the backward pass of each microbatch,
    by whoever takes gradients before they are summed."""

    parts: list[nn.Module]
    call: nn.Module
    groups: Groups
    dtype: torch.dtype
    device: torch.device
    places: dict[str, Place] = field(default_factory=dict)
    probe: GradientProbe = field(default_factory=GradientProbe)
    wire: Wire = field(default_factory=Wire)
    pipeline: Pipeline | None = None
    mirror: Mirror | None = None
    draws: Draws | None = None
    after_backward: Callable[[], None] | None = None
    kept: Kept = field(default_factory=Kept)
    without_gradient: list[str] = field(default_factory=list)
    _locals: dict[str, nn.Parameter] = field(default_factory=dict)
    _metric_names: list[str] | None = None
    _aside: bool = False

    @property
    def bare(self) -> nn.Module:
        """The model where there is no pipeline."""
        (part,) = self.parts
        return part

    @property
    def sharded(self) -> bool:
        return isinstance(self.parts[0], FSDPModule)

    @property
    def has_head(self) -> bool:
        return self.pipeline is None or self.pipeline.has_head

    @property
    def counts(self) -> bool:
        """Whether this rank's loss sums count: of ranks that compute the same ones, one does."""
        return self.groups.axes.tp.rank == 0 and self.has_head

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the whole model; the copy of a tied table is none."""
        named = {name: parameter for part in self.parts for name, parameter in part.named_parameters()}
        return {name: parameter for name, parameter in named.items() if name != MIRROR}

    @property
    def frozen(self) -> set[str]:
        """Names of this rank's parameters that take no gradient."""
        return {name for name, parameter in self.named_parameters().items() if not parameter.requires_grad}

    def compute(self) -> AbstractContextManager:
        """The precision that forward runs in: master weights stay as they are, products are of `dtype`."""
        if self.dtype in (torch.float32, torch.float64):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def microbatch(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of one microbatch. Only the last one of a step crosses the replicate axis."""
        if isinstance(self.call, FSDPModule):
            if self.groups.degrees.dp_replicate > 1 and self.after_backward is None:
                self.call.set_requires_all_reduce(last)
            return nullcontext()
        if isinstance(self.call, DistributedDataParallel) and (self._aside or not last):
            return self.call.no_sync()
        return nullcontext()

    def run(
        self, batches: list[Batch], loss_of: LossOf, factor: float, begin: Callable[[int], None]
    ) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        """Forward and backward of every microbatch, each loss sum times `factor`. `begin(index)` is called before each.
        Returns the loss sums and the metrics by microbatch; they are zero where this rank does not count."""
        if self.pipeline is not None:
            return self._run_pipeline(self.pipeline, batches, loss_of, factor, begin)
        sums: list[torch.Tensor] = []
        metrics: dict[str, list[torch.Tensor]] = {}
        for index, batch in enumerate(batches):
            begin(index)
            self.probe.begin(index)
            batch = batch.to(self.device)
            head = loss_of(batch)
            with self.microbatch(last=index == len(batches) - 1):
                with self.compute(), self.kept.counting(0, self.bare):
                    loss_sum, extra = forward(self.call, batch, head)
                if factor:
                    (loss_sum * factor).backward()
                    self._gradients_made()
            self.probe.next_microbatch()
            sums.append(loss_sum.detach() * self.counts)
            for name, value in extra.items():
                metrics.setdefault(name, []).append(value.detach() * self.counts)
        return sums, metrics

    def _run_pipeline(
        self, pipeline: Pipeline, batches: list[Batch], loss_of: LossOf, factor: float, begin: Callable[[int], None]
    ) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        missing = pipeline.padded(len(batches)) - len(batches)
        moved = [batch.to(self.device) for batch in batches]
        moved += [batches[0].without_targets().to(self.device)] * missing
        heads = [loss_of(batch) for batch in moved]
        self.probe.begin(None)
        found = pipeline.run(moved, heads, factor, begin, self._gradients_made, self.kept)
        self.probe.next_microbatch()
        zero = torch.zeros((), device=self.device)
        if self._metric_names is None:  # the same in every step; ranks without the head have to be told
            told = [list(found[0][1]) if found else None]
            dist.broadcast_object_list(told, group=pipeline.axis.group, group_src=pipeline.head_rank)
            self._metric_names = told[0]
        named = self._metric_names or []
        if not found:
            return [zero] * len(batches), {name: [zero] * len(batches) for name in named}
        found = found[: len(batches)]  # padding adds nothing
        sums = [loss_sum * self.counts for loss_sum, _ in found]
        return sums, {name: [extra[name].detach() * self.counts for _, extra in found] for name in named}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a run that leaves no trace: gradients, buffers and noted norms come back as they were. The run takes
        part in all collectives but DDP's, whose buckets hold the step's gradients."""
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        buffers = [(buffer, buffer.clone()) for part in self.parts for buffer in part.buffers()]
        grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._aside = True
        try:
            with self.probe.aside():
                yield
        finally:
            self._aside = False
            for parameter, grad in zip(parameters, grads):
                parameter.grad = grad
            for buffer, before in buffers:
                buffer.copy_(before)

    def _gradients_made(self) -> None:
        if self.after_backward is not None:
            self.after_backward()

    def own_part(self, batch: Batch) -> Batch:
        """The places of a microbatch's rows that this rank computes."""
        axes = self.groups.axes
        return batch if axes.cp.size == 1 else batch.part(axes.columns(batch.tokens_BT.shape[1]))

    def evaluate(self, batch: Batch, head: Callable[[Any], Any]) -> Any:
        """The result of `head` on one microbatch, without gradients; None where this rank does not have the head."""
        batch = batch.to(self.device)
        if self.pipeline is not None:
            return self.pipeline.evaluate(batch, head)
        with torch.no_grad(), self.compute():
            return forward(self.call, batch, head)

    def complete_gradients(self) -> None:
        """After the last backward pass: sum what is still partial over axes that FSDP2 does not know."""
        with torch.no_grad():
            if self.mirror is not None:
                self.mirror.bring_gradient()
            sum_missing(
                (local(_gradient(parameter)), self.places[name].missing)
                for name, parameter in self.named_parameters().items()
                if parameter.requires_grad and self.places[name].missing.size > 1
            )

    def grad_norm(self) -> torch.Tensor:
        """2-norm of the whole model's gradient: scalar float64, the same on every rank."""
        return global_norm(self.gradients().values(), self.groups.world, self.device)

    def gradients(self) -> dict[str, Piece]:
        """What this rank holds of the gradients."""
        named = self.named_parameters().items()
        return {name: self.places[name].piece(p.grad) for name, p in named if p.grad is not None}

    def pieces(self) -> dict[str, Piece]:
        """What this rank holds of the parameters and of the buffers that persist."""
        # first of all, since asking for it makes FSDP2 give up whole parameters that an evaluation has left gathered
        kept = {name for part in self.parts for name in part.state_dict()}
        held = {name: self.places[name].piece(parameter) for name, parameter in self.named_parameters().items()}
        named = [pair for part in self.parts for pair in part.named_buffers()]
        buffers = {name: buffer for name, buffer in named if name in kept}
        first = self.groups.stage.rank == 0
        return held | {name: piece_of(buffer).owned_if(first) for name, buffer in buffers.items()}

    def locals(self) -> dict[str, nn.Parameter]:
        """Parameters as plain tensors of what this rank holds, over the same memory: what an optimizer works on."""
        if not self._locals:
            named = self.named_parameters().items()
            self._locals = {
                name: nn.Parameter(p.to_local(), p.requires_grad) if isinstance(p, DTensor) else p for name, p in named
            }
        return self._locals

    def hand_over_gradients(self) -> list[torch.Tensor]:
        """Give the gradients to the `locals`; returns them, and keeps the names of trainable ones that have none."""
        grads, self.without_gradient = [], []
        for name, parameter in self.named_parameters().items():
            mine = self.locals()[name]
            if parameter is not mine:
                mine.data = local(parameter.detach())  # FSDP2 may have moved it (padding) at its first use
                mine.grad = None if parameter.grad is None else local(parameter.grad)
            if mine.grad is not None:
                grads.append(mine.grad)
            elif parameter.requires_grad:
                self.without_gradient.append(name)
        return grads

    def updated(self) -> None:
        """To be called after parameters changed (an update, a load)."""
        if self.mirror is not None:
            self.mirror.bring_values()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()
        for parameter in self.locals().values():
            parameter.grad = None


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
