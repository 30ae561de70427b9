"""Experts over ranks: tokens travel to the ranks of their experts and back by all-to-all, with uneven splits.

N tokens, K choices of a token, M = N K rows, E experts, S ranks of the expert axis. A model offers its experts' seam,
`dispatch`; see `place_experts`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from truestep.numerics.axis import Axis, exchanged
from truestep.numerics.grouping import Grouping, group, permute, spread
from truestep.numerics.pieces import span


@runtime_checkable
class HasExperts(Protocol):
    """A model some of whose blocks have experts, by the blocks' numbers."""

    def moes(self) -> dict[int, Any]: ...


def place_experts(model: nn.Module, axis: Axis, forced_balance: bool = False) -> None:
    """Let the experts of a model work over `axis`; their parameters are cut in the same way."""
    if axis.size > 1 or forced_balance:
        for moe in model.moes().values() if isinstance(model, HasExperts) else ():
            moe.dispatch = ExpertParallel(axis, moe.dispatch.num_experts, forced_balance)


@dataclass(frozen=True)
class Sent:
    """Rows under way: `by_expert` groups this rank's by expert, `regrouped` those that come here."""

    ticket: torch.Tensor
    flight: "_Flight"
    by_expert: Grouping
    regrouped: Grouping
    choices: int


class ExpertParallel:
    """Rank r has the experts of span(E, S, r).

    `forced_balance` is for dry runs: rows go to all experts in turn, whatever the router says, so that no size depends
    on data. All ranks must then have equally many tokens."""

    def __init__(self, axis: Axis, num_experts: int, forced_balance: bool = False):
        self.axis, self.num_experts, self.forced_balance = axis, num_experts, forced_balance
        spans = [span(num_experts, axis.size, rank) for rank in range(axis.size)]
        self.held = [stop - first for first, stop in spans]
        self.first, self.stop = spans[axis.rank]

    def send(self, x_ND: torch.Tensor, experts_NK: torch.Tensor) -> Sent:
        """Start the tokens' travel; until `receive` other work may go on."""
        keys_M = experts_NK.flatten()
        if self.forced_balance:
            keys_M = torch.arange(len(keys_M), device=keys_M.device) % self.num_experts
        by_expert = group(keys_M, self.num_experts)
        sent, received, regrouped = self._plan(by_expert, len(keys_M))
        flight = _Flight(self.axis, sent, received)
        ticket = _Depart.apply(spread(x_ND, by_expert.order, by_expert.inverse), flight)
        assert isinstance(ticket, torch.Tensor)
        return Sent(ticket, flight, by_expert, regrouped, experts_NK.shape[1])

    def receive(self, sent: Sent) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows for this rank's experts, those of each one together in the order of ranks, and where they end."""
        rows = _Arrive.apply(sent.ticket, sent.flight)
        assert isinstance(rows, torch.Tensor)
        return permute(rows, sent.regrouped.order, sent.regrouped.inverse), sent.regrouped.ends

    def back(self, rows_MD: torch.Tensor, sent: Sent) -> torch.Tensor:
        """Outputs at the tokens' own ranks, as rows_NKD."""
        by_source = permute(rows_MD, sent.regrouped.inverse, sent.regrouped.order)
        rows = self.axis.exchange(by_source, sent.flight.sent, sent.flight.received)
        return permute(rows, sent.by_expert.inverse, sent.by_expert.order).unflatten(0, (-1, sent.choices))

    def _plan(self, by_expert: Grouping, num_rows: int) -> tuple[list[int], list[int], Grouping]:
        """Rows to and from each rank, and how to group what comes by expert. The one look at data on the host."""
        own = self.held[self.axis.rank]
        if self.forced_balance:
            counts = [num_rows // self.num_experts + (e < num_rows % self.num_experts) for e in range(self.num_experts)]
            spans = [span(self.num_experts, self.axis.size, rank) for rank in range(self.axis.size)]
            sent = [sum(counts[first:stop]) for first, stop in spans]
            received = [sent[self.axis.rank]] * self.axis.size
            mine = torch.tensor(counts[self.first : self.stop], device=by_expert.ends.device)
            received_SE = mine.repeat(self.axis.size, 1)
        else:
            counts_E = torch.diff(by_expert.ends, prepend=by_expert.ends.new_zeros(1)).long()
            received_SE = counts_E[None]
            if self.axis.size > 1:
                received_SE = exchanged(counts_E, self.axis, [own] * self.axis.size, self.held).view(-1, own)
            sent_S = torch.stack([part.sum() for part in counts_E.split(self.held)])
            numbers = torch.cat((sent_S, received_SE.sum(1))).tolist()
            sent, received = numbers[: self.axis.size], numbers[self.axis.size :]
        experts = torch.arange(own, device=received_SE.device).repeat(self.axis.size)
        keys = experts.repeat_interleave(received_SE.flatten(), output_size=sum(received))
        return sent, received, group(keys, own)


class _Flight:
    """One exchange of rows that is waited for later than it starts: there, and with gradients back."""

    def __init__(self, axis: Axis, sent: list[int], received: list[int]):
        self.axis, self.sent, self.received = axis, sent, received
        self._under_way: tuple[torch.Tensor, torch.Tensor, Any] | None = None

    def start(self, rows: torch.Tensor, received: list[int], sent: list[int]) -> None:
        rows = rows.contiguous()
        out, work = rows.view_as(rows), None
        if self.axis.size > 1:
            out = rows.new_empty(sum(received), *rows.shape[1:])
            work = dist.all_to_all_single(out, rows, received, sent, group=self.axis.group, async_op=True)
        self._under_way = rows, out, work  # what is sent must live until the wait

    def wait(self) -> torch.Tensor:
        """The rows that came."""
        assert self._under_way is not None
        _, out, work = self._under_way
        self._under_way = None
        if work is not None:
            work.wait()
        return out


class _Depart(torch.autograd.Function):
    """Starts the exchange, and gives a ticket for `_Arrive`; the rows themselves travel beside autograd, since their
    number changes. In backward it waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        flight.start(rows, flight.received, flight.sent)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.flight.wait(), None


class _Arrive(torch.autograd.Function):
    """Waits for the rows; in backward it starts their gradients' way back."""

    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        return flight.wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        flight = ctx.flight
        flight.start(grads[0], flight.sent, flight.received)
        return grads[0].new_zeros(()), None
