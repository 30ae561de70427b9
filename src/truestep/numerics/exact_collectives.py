"""Collectives of exact reductions, each with a residual: an int64 that, summed over all ranks, is 0 modulo 2^64 unless
bits changed on the way. Residuals of any number of collectives, over any groups, may be added up before the one look.

Sums of bit patterns are taken modulo 2^64. What one rank gives another is weighted by an odd number of that pair, so a
changed bit, a lost message and one at the wrong place all show; only changes that cancel out within one do not. With a
trail, the number also depends on how many collectives of the step a group has had.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from truestep.numerics.fixed_point import GOLDEN, signed


class Trail:
    """What went from rank to rank in the exact collectives of a step, so that a residual that is not 0 can be traced to
    a pair of ranks. `strike` is where fault injection gets at what was delivered."""

    def __init__(self):
        self.strike: Callable[[torch.Tensor], None] | None = None
        self._pairs: dict[int, tuple[dist.ProcessGroup, torch.Tensor, torch.Tensor]] = {}
        self._sums: dict[int, tuple[dist.ProcessGroup, torch.Tensor, torch.Tensor]] = {}
        self._turns: dict[int, int] = {}

    def turn(self, group: dist.ProcessGroup) -> int:
        """An odd number for the next collective of a group, so that what is too much in one cannot make up for what is
        missing in another."""
        count = self._turns.get(id(group), 0)
        self._turns[id(group)] = count + 1
        return _mark(count, 0)

    def clear(self) -> None:
        """A step begins."""
        self._pairs.clear()
        self._sums.clear()
        self._turns.clear()

    def delivered(self, x: torch.Tensor) -> None:
        if self.strike is not None:
            self.strike(x)

    def exchanged(self, group: dist.ProcessGroup, sent_W: torch.Tensor, received_W: torch.Tensor) -> None:
        """The sums of bits that this rank sent to each other and received from each."""
        _note(self._pairs, group, sent_W, received_W)

    def summed(self, group: dist.ProcessGroup, before: torch.Tensor, after: torch.Tensor) -> None:
        """The sums of a vector of integers on this rank before and after an all-reduce."""
        _note(self._sums, group, before.reshape(1), after.reshape(1))

    def broken(self) -> list[tuple[int, int]]:
        """Pairs of ranks of the job (giver, receiver) between which bits changed in this rank's groups, as all of a
        group know. An all-reduce of which a rank has a wrong result is the pair of that rank with itself. Collective
        over each group."""
        found = []
        for group, sent_W, received_W in self._pairs.values():
            world, ranks = group.size(), dist.get_process_group_ranks(group)
            table = _everybodys(torch.cat((sent_W, received_W)), group)
            sent, received = table[:, :world], table[:, world:].T
            found += [(ranks[s], ranks[t]) for s, t in (sent != received).nonzero().tolist()]
        for group, before, after in self._sums.values():
            ranks, table = dist.get_process_group_ranks(group), _everybodys(torch.cat((before, after)), group)
            wrong = (table[:, 1] != table[:, 0].sum()).nonzero().flatten().tolist()
            found += [(ranks[place], ranks[place]) for place in wrong]
        return sorted(set(found))


def _note(notes: dict, group: dist.ProcessGroup, *values: torch.Tensor) -> None:
    _, *known = notes.get(id(group), (group, *(torch.zeros_like(value) for value in values)))
    notes[id(group)] = group, *(old + value for old, value in zip(known, values))


def _everybodys(mine_N: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A vector of every rank of the group, as rows."""
    rows = [torch.empty_like(mine_N) for _ in range(group.size())]
    dist.all_gather(rows, mine_N, group=group)
    return torch.stack(rows)


def exchange_rows(
    x_WN: torch.Tensor, group: dist.ProcessGroup, trail: Trail | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give row r of contiguous `x_WN` to rank r of `group`. Returns what rank r gave this one, as row r, and the
    residual. Half of a reduce-scatter: the sum over rows is the caller's."""
    received_WN = torch.empty_like(x_WN)
    dist.all_to_all_single(received_WN, x_WN, group=group)
    rank, world = group.rank(), group.size()
    turn = trail.turn(group) if trail is not None else 1
    sent_W = _weighted(x_WN, [_mark(rank, other) * turn for other in range(world)])
    if trail is not None:
        trail.delivered(received_WN)
    received_W = _weighted(received_WN, [_mark(other, rank) * turn for other in range(world)])
    if trail is not None:
        trail.exchanged(group, sent_W, received_W)
    return received_WN, sent_W.sum() - received_W.sum()


def sum_integers_(x_N: torch.Tensor, group: dist.ProcessGroup, trail: Trail | None = None) -> torch.Tensor:
    """Replace int64 `x_N` by its sum over `group`. Returns the residual."""
    world, rank = group.size(), group.rank()
    turn = signed(trail.turn(group) if trail is not None else 1)
    before = x_N.sum() * turn
    dist.all_reduce(x_N, group=group)
    if trail is not None:
        trail.delivered(x_N)
    after = x_N.sum() * turn
    if trail is not None:
        trail.summed(group, before, after)
    return before * signed(sum(_mark(0, other) for other in range(world))) - after * signed(_mark(0, rank))


def send_integers(
    x_N: torch.Tensor, group: dist.ProcessGroup, source: int, target: int, trail: Trail | None = None
) -> torch.Tensor:
    """Fill int64 `x_N` of rank `target` of `group` from that of rank `source`; for the others there is nothing to do.
    Returns the residual."""
    if group.rank() not in (source, target):
        return x_N.new_zeros(())
    sends = group.rank() == source
    operation, peer = (dist.isend, target) if sends else (dist.irecv, source)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, x_N, group=group, group_peer=peer)]):
        work.wait()
    if trail is not None and not sends:
        trail.delivered(x_N)
    # the only message of its kind in a step, and between two ranks alone: nothing else could make up for it
    return x_N.sum() * signed(_mark(source, target) if sends else -_mark(source, target))


def bit_sum(x_RN: torch.Tensor) -> torch.Tensor:
    """Of each row of contiguous `x_RN` (4 or 8 bytes an element), the sum of its bits as int64, modulo 2^64: in words
    of 8 bytes where a row is a whole number of them."""
    if x_RN.element_size() == 8 or x_RN.shape[1] % 2 == 0:
        return x_RN.view(torch.int64).sum(1)
    return x_RN.view(torch.int32).to(torch.int64).sum(1)


def _weighted(x_WN: torch.Tensor, weights: list[int]) -> torch.Tensor:
    """The sum of bits of each row, times its weight."""
    marks = torch.tensor([signed(weight) for weight in weights]).to(x_WN.device, non_blocking=True)
    return bit_sum(x_WN) * marks


def _mark(source: int, target: int) -> int:
    """An odd number for messages from `source` to `target` (a step of the generator SplitMix64)."""
    mixed = ((source << 32) + target + 1) * GOLDEN % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    return mixed | 1
