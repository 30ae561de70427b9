"""A step through a pipeline: this rank's parts of the model, run on all microbatches in the order of a schedule.

Every rank of the pipeline has the rows themselves; only hidden states travel forward and their gradients back. A
microbatch's loss sum is multiplied by the factor of the step and nothing else, whatever the number of microbatches.

FSDP2 gathers the weights of a part once a step, keeps them, and reduces their gradients once, after the last backward
pass.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from truestep.numerics.axis import Axis
from truestep.numerics.batch import Batch
from truestep.parallel.kept import Kept
from truestep.parallel.schedule import Action, orders, rank_of_part

Head = Callable[[Any], Any]


@dataclass(frozen=True)
class Shape:
    """Of the hidden states that travel: hidden_size, ranks among which the sequence is cut, dtype."""

    hidden_size: int
    sequence_ranks: int
    dtype: torch.dtype


@dataclass
class _Kept:
    """Of one microbatch in one part, from its forward to the end of its backward pass. `state`: between I and W."""

    given: torch.Tensor | None
    result: torch.Tensor
    state: Any = None


@dataclass
class Pipeline:
    """`parts`: the modules on this rank by their number in the pipeline."""

    parts: dict[int, nn.Module]
    axis: Axis
    schedule: str
    per_rank: int
    shape: Shape
    compute: Callable[[], AbstractContextManager]
    _kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    _results: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _arrived: dict[tuple[str, int, int], tuple[torch.Tensor, list[dist.Work]]] = field(default_factory=dict)
    _sent: list[tuple[torch.Tensor, list[dist.Work]]] = field(default_factory=list)

    @property
    def num_parts(self) -> int:
        return self.axis.size * self.per_rank

    @property
    def head_rank(self) -> int:
        """The rank of the pipeline with the last part."""
        return self._rank_of(self.num_parts - 1)

    @property
    def has_head(self) -> bool:
        """Whether the last part lies on this rank."""
        return self.num_parts - 1 in self.parts

    def run(
        self,
        batches: list[Batch],
        heads: list[Head],
        factor: float,
        begin: Callable[[int], None],
        after_backward: Callable[[], None],
        kept: Kept,
    ) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Forward and backward of all microbatches; `begin` says which one is next, `after_backward` is called after
        each backward pass that makes gradients of weights, `kept` counts what forward passes keep. On the rank with the
        last part, what each head returned (a loss sum and metrics) by microbatch; elsewhere nothing. The schedule may
        ask for more microbatches than there are: `batches` then holds padding at its end."""
        order = orders(self.schedule, self.axis.size, self.per_rank, len(batches))[self.axis.rank]
        assert order.num_microbatches == len(batches), "pad the microbatches first"
        found: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
        for part in self.parts.values():
            _hold(part)
        for action in order.actions:
            batch = batches[action.microbatch]
            if action.what == "F":
                begin(action.microbatch)
                with kept.counting(action.part, self.parts[action.part]):
                    result = self._forward(action, batch, heads[action.microbatch])
                if result is not None:
                    found[action.microbatch] = result
            elif action.what in ("SEND_F", "SEND_B"):
                self._send(action)
            elif action.what in ("RECV_F", "RECV_B"):
                self._receive(action, batch)
            elif factor:
                begin(action.microbatch)
                self._backward(action, factor)
                if action.what != "I":
                    after_backward()
        for part in self.parts.values():
            _release(part)
        self._settle()
        return [found[index] for index in sorted(found)]

    def padded(self, num_microbatches: int) -> int:
        """How many microbatches the schedule needs for that many."""
        return orders(self.schedule, self.axis.size, self.per_rank, num_microbatches)[0].num_microbatches

    def evaluate(self, batch: Batch, head: Head) -> Any:
        """Forward only; the head's result on the rank with the last part, None elsewhere."""
        result = None
        with torch.no_grad():
            for number, part in sorted(self.parts.items()):
                given = batch.tokens_BT
                if number > 0:
                    if number - 1 not in self.parts:
                        self._receive(Action("RECV_F", number, 0), batch)
                    given = self._take("F", number, 0)
                with self.compute():
                    out = _call(part, given, batch, head)
                if number == self.num_parts - 1:
                    result = out
                else:
                    self._results[number, 0] = out
                    if number + 1 not in self.parts:
                        self._send(Action("SEND_F", number, 0))
        self._settle()
        return result

    def _settle(self) -> None:
        """Wait until everything has left; forget what a step without gradients did not use."""
        for _, works in self._sent:
            for work in works:
                work.wait()
        for kept in (self._sent, self._kept, self._results, self._gradients, self._arrived):
            kept.clear()

    def _forward(self, action: Action, batch: Batch, head: Head) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        number, part, given = action.part, self.parts[action.part], None
        if number > 0:
            given = self._take("F", number, action.microbatch).requires_grad_()
        with self.compute():
            out = _call(part, batch.tokens_BT if given is None else given, batch, head)
        last, key = number == self.num_parts - 1, (number, action.microbatch)
        self._kept[key] = _Kept(given, out[0] if last else out)
        if last:
            return out[0].detach(), out[1]
        self._results[key] = out.detach()
        return None

    def _backward(self, action: Action, factor: float) -> None:
        number, part, key = action.part, self.parts[action.part], (action.part, action.microbatch)
        kept = self._kept[key]
        if action.what == "W":
            if kept.given is None:  # without an input there was nothing to do for I
                kept.result.backward(kept.state)
            else:
                stage_backward_weight(part.parameters(), kept.state)
        else:
            last = number == self.num_parts - 1
            grad = None if last else self._take("B", number, action.microbatch)
            result = kept.result * factor if last else kept.result
            if action.what == "B":
                result.backward(grad)
            elif kept.given is None:
                kept.state = grad
            else:
                grads = None if grad is None else [grad]
                _, kept.state = stage_backward_input([result], grads, [kept.given], part.parameters())
            if kept.given is not None:
                assert kept.given.grad is not None
                self._gradients[key] = kept.given.grad
                kept.given.grad = None
        if action.what != "I":
            del self._kept[key]

    def _take(self, direction: str, number: int, microbatch: int) -> torch.Tensor:
        """What came from the neighbouring part: over the wire, or, where it lies on this rank too, by hand."""
        neighbour = number - 1 if direction == "F" else number + 1
        if neighbour in self.parts:
            kept = self._results if direction == "F" else self._gradients
            return kept.pop((neighbour, microbatch))
        tensor, works = self._arrived.pop((direction, number, microbatch))
        for work in works:
            work.wait()
        return tensor

    def _send(self, action: Action) -> None:
        forward, key = action.what == "SEND_F", (action.part, action.microbatch)
        tensor = (self._results if forward else self._gradients).pop(key)
        tensor = tensor.to(self.shape.dtype).contiguous()
        peer = self._rank_of(action.part + 1 if forward else action.part - 1)
        self._sent = [sent for sent in self._sent if not all(work.is_completed() for work in sent[1])]
        self._sent.append((tensor, self._post(dist.isend, tensor, peer)))

    def _receive(self, action: Action, batch: Batch) -> None:
        rows, length = batch.tokens_BT.shape
        size = rows, length // self.shape.sequence_ranks, self.shape.hidden_size
        tensor = torch.empty(size, dtype=self.shape.dtype, device=batch.tokens_BT.device)
        forward = action.what == "RECV_F"
        peer = self._rank_of(action.part - 1 if forward else action.part + 1)
        works = self._post(dist.irecv, tensor, peer)
        self._arrived["F" if forward else "B", action.part, action.microbatch] = tensor, works

    def _post(self, operation: Any, tensor: torch.Tensor, peer: int) -> list[dist.Work]:
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=self.axis.group, group_peer=peer)])

    def _rank_of(self, number: int) -> int:
        return rank_of_part(self.schedule, self.axis.size, self.per_rank)(number)


def _call(part: nn.Module, x: torch.Tensor, batch: Batch, head: Head) -> Any:
    return part(x, batch.positions_BT, batch.documents_BT, head=head, labels_BT=batch.labels_BT)


def _hold(part: nn.Module) -> None:
    """FSDP2: gather what is not gathered, and neither reduce gradients nor free weights until told."""
    if isinstance(part, FSDPModule):
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        part.set_is_last_backward(False)
        part.set_reshard_after_backward(False)
        part.set_requires_gradient_sync(False)


def _release(part: nn.Module) -> None:
    if isinstance(part, FSDPModule):
        reduce_gradients(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def reduce_gradients(part: FSDPModule) -> None:
    """Reduce the gradients that FSDP2 has held back; what autograd's last hook does where there is one."""
    part.set_is_last_backward(True)
    part.set_reshard_after_backward(True)
    part.set_requires_gradient_sync(True)
    state = fully_shard.state(part)  # pyright: ignore[reportFunctionMemberAccess]
    for each in state._state_ctx.all_states:
        groups = each._fsdp_param_groups if hasattr(each, "_fsdp_param_groups") else [each._fsdp_param_group]  # 2.11
        for group in groups:
            if group is not None:
                group.post_backward()
    state._root_post_backward_final_callback()
