"""What native collectives delivered, looked at in the steps in which bits are compared.

An all-gather only copies: the bits of what each rank got are compared with those of what was sent. A sum is computed a
second time in float64 and may differ by what rounding explains: with W summands x and unit roundoff u by at most
W u Σ|x| (Higham, Accuracy and Stability of Numerical Algorithms, equation 4.4). A changed bit below that is not seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from truestep.numerics.axis import all_gather, reduce_scatter
from truestep.numerics.exact_collectives import bit_sum
from truestep.numerics.fixed_point import GOLDEN, signed

_SLICE = 1 << 22
"""Columns of a sum that are computed again at a time, which bounds the scratch memory."""


@dataclass(frozen=True)
class Delivered:
    """What this rank has seen of the collectives of one group. `ranks`: of the job. `said[s]`: of each rank, by its
    place in the group, what it says (a digest of bits) of all that rank s gave to everyone: the giver itself, and every
    receiver. `wrong`: of each rank, how many elements of sums were further off than rounding explains; `alike`: each of
    them has, or should have, the very same sums."""

    ranks: Sequence[int]
    said: list[list[int]]
    wrong: list[int]
    alike: bool

    @property
    def sound(self) -> bool:
        return not any(self.wrong) and all(len(set(row)) == 1 for row in self.said)


class _Seen:
    """The running digests of one group on this rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.got_W = torch.zeros(group.size(), dtype=torch.int64, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.count = 0
        self.alike = False

    def take(self, got_WN: torch.Tensor, own_N: torch.Tensor) -> None:
        """What every rank gave, a row each; in this rank's place count the bits that it gave away, not their copy."""
        self.count += 1
        sums_W = bit_sum(_words(got_WN))
        sums_W[self.group.rank()] = bit_sum(_words(own_N.reshape(1, -1)))[0]
        self.got_W += sums_W * signed(GOLDEN * self.count | 1)


class Wire:
    """`armed`: look at every collective, which is then waited for. `strike` is where fault injection gets at what was
    delivered."""

    def __init__(self):
        self.armed = False
        self.strike: Callable[[torch.Tensor], None] | None = None
        self._seen: dict[int, _Seen] = {}

    @property
    def looks(self) -> bool:
        """Whether anything is done to what is delivered."""
        return self.armed or self.strike is not None

    def begin(self, *, armed: bool) -> None:
        """A step begins."""
        self.armed = armed
        self._seen.clear()

    def gathered(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
        """After an all-gather: `given` by this rank, `output` of all, both flat."""
        if self.strike is not None:
            self.strike(output)
        if self.armed:
            self._of(group, output.device).take(output.view(group.size(), -1), given)

    def scattered(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
        """After a reduce-scatter (sum)."""
        if self.strike is not None:
            self.strike(output)
        if not self.armed:
            return
        given_WN, seen = given.view(group.size(), -1), self._of(group, output.device)
        for start in range(0, output.numel(), _SLICE):
            wide = given_WN[:, start : start + _SLICE].double()
            both = torch.stack((wide, wide.abs()), dim=1).contiguous()
            again = both.new_empty(both.shape[1:])
            reduce_scatter(again.view(-1), both.view(-1), group=group)
            seen.wrong += _far(output[start : start + _SLICE], again[0], again[1], group.size())

    def summed(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
        """After an all-reduce (sum), whose results are the same bits on every rank."""
        if self.strike is not None:
            self.strike(output)
        if not self.armed:
            return
        seen, flat = self._of(group, output.device), output.view(-1)
        seen.alike = True
        for start in range(0, flat.numel(), _SLICE):
            wide = given.view(-1)[start : start + _SLICE].double()
            again = torch.stack((wide, wide.abs()))
            dist.all_reduce(again, group=group)
            seen.wrong += _far(flat[start : start + _SLICE], again[0], again[1], group.size())

    def delivered(self) -> list[Delivered]:
        """What the ranks of each group say since the step began. Collective."""
        found = []
        for seen in self._seen.values():
            size = seen.group.size()
            mine = torch.cat((seen.got_W, seen.wrong.view(1)))
            all_ = mine.new_empty(size * len(mine))
            all_gather(all_, mine, group=seen.group)
            *said, wrong = all_.view(size, -1).T.tolist()
            found.append(Delivered(dist.get_process_group_ranks(seen.group), said, wrong, seen.alike))
        self.begin(armed=False)
        return found

    def _of(self, group: dist.ProcessGroup, device: torch.device) -> _Seen:
        return self._seen.setdefault(id(group), _Seen(group, device))


def _far(output: torch.Tensor, again: torch.Tensor, size: torch.Tensor, world: int) -> torch.Tensor:
    """How many elements are off by more than rounding explains; int64 scalar."""
    info = torch.finfo(output.dtype)
    bound = (world * info.eps / 2) * size + world * info.smallest_normal * info.eps
    if output.dtype == torch.float64:
        bound *= 2  # what it is compared with is rounded as well
    close = (output.double() - again).abs() <= bound
    return (~close & (output.isfinite() | again.isfinite())).sum()


def _words(x_RN: torch.Tensor) -> torch.Tensor:
    """Rows of any dtype as integers of 4 bytes, or single bytes made so."""
    x_RN = x_RN.contiguous()
    row_bytes = x_RN.shape[1] * x_RN.element_size()
    return x_RN.view(torch.int32) if row_bytes % 4 == 0 else x_RN.view(torch.uint8).to(torch.int32)
