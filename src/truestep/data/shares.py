"""Which replica works on which microbatches of a step: the same number each, or fewer for one that is slow.

The microbatches of a global batch, by number, are dealt out in groups of one for each rank that shares a replica's
weights (dp_shard): group g holds microbatches [g · shards, (g + 1) · shards) and goes to replica
turns[g mod len(turns)]. With turns 0, 1, …, replicas - 1 that is microbatch j to data rank j mod (replicas · shards).

Replicas meet once a step, so one may have fewer microbatches than another. Ranks of one replica meet in every
microbatch: they always have equally many, where need be of padding. Nothing here changes a global batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

WORTH = 0.95
"""Of the time with equal shares: only below that are unequal ones worth it."""


@dataclass
class Shares:
    """`count(step)`: microbatches of the global batch of a step. A data rank is replica · shards + shard."""

    replicas: int
    shards: int
    count: Callable[[int], int]
    turns: tuple[int, ...] = field(default=())

    def __post_init__(self):
        self.turns = self.turns or tuple(range(self.replicas))

    @property
    def even(self) -> bool:
        return self.turns == tuple(range(self.replicas))

    def number(self, index: int, data_rank: int) -> int:
        """Number in the global batch of the microbatch that a data rank has at `index`; beyond the batch: padding."""
        replica, shard = divmod(data_rank, self.shards)
        mine = [place for place, turn in enumerate(self.turns) if turn == replica]
        cycles, place = divmod(index, len(mine))
        return (cycles * len(self.turns) + mine[place]) * self.shards + shard

    def active(self, step: int, data_rank: int) -> int:
        """How many microbatches a data rank computes in a step, padding included: at least one, since replicas meet
        after the last."""
        return max(1, self._groups(step, data_rank // self.shards))

    def rounds(self, step: int) -> int:
        """The most that any rank computes: what the list of each rank is filled up to."""
        return max(self.active(step, replica * self.shards) for replica in range(self.replicas))

    def everywhere(self, step: int) -> int:
        """The fewest that any rank computes."""
        return min(self.active(step, replica * self.shards) for replica in range(self.replicas))

    def mine(self, step: int, data_rank: int) -> list[int]:
        """Numbers of the microbatches of a data rank, without padding."""
        numbers = (self.number(index, data_rank) for index in range(self.active(step, data_rank)))
        return [number for number in numbers if number < self.count(step)]

    def deal(self, step: int, pace_s: Sequence[float]) -> bool:
        """Deal out anew by the seconds that each replica takes for a microbatch, so that the last of a step of this
        size is done earliest. Returns whether anything changed. `turns` hold from a step boundary on: the same on all
        ranks."""
        before, groups = self.turns, -(-self.count(step) // self.shards)
        ends = [(2 * pace, replica) for replica, pace in enumerate(pace_s)]  # of the next group that each would take
        turns = list(range(self.replicas))
        heapify(ends)
        for _ in range(groups - self.replicas):
            end, replica = ends[0]
            turns.append(replica)
            heapreplace(ends, (end + pace_s[replica], replica))
        equal = tuple(range(self.replicas))
        even_s, dealt_s = (self._last_s(step, each, pace_s) for each in (equal, tuple(turns)))
        self.turns = tuple(turns) if dealt_s < WORTH * even_s else equal
        return self.turns != before

    def _last_s(self, step: int, turns: tuple[int, ...], pace_s: Sequence[float]) -> float:
        """When the last replica is done with a step."""
        dealt = Shares(self.replicas, self.shards, self.count, turns)
        return max(pace * dealt.active(step, replica * self.shards) for replica, pace in enumerate(pace_s))

    def _groups(self, step: int, replica: int) -> int:
        cycles, rest = divmod(-(-self.count(step) // self.shards), len(self.turns))
        return cycles * self.turns.count(replica) + self.turns[:rest].count(replica)
