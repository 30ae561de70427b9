"""The degrees of a mesh as whole numbers, and where each rank stands in it."""

from dataclasses import asdict, dataclass
from math import prod
from typing import NamedTuple

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the outermost to the innermost; their product is the world size. The expert axis is folded into the last three.
"""


class Coordinate(NamedTuple):
    """A rank's place along each axis. `edp` and `ep` count the same ranks as dp_shard, cp and tp do together."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    edp: int
    ep: int


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis.

    Within one index of (pp, dp_replicate) the dp_shard·cp·tp ranks, in order, also form (edp, ep) with ep innermost:
    the experts lie over ep, and edp ranks share the weights of each."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Groups of ranks that read rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def dense_shard(self) -> int:
        """Ranks that share one copy of the weights that are not experts'."""
        return self.dp_shard * self.cp

    @property
    def edp(self) -> int:
        """Ranks that share one copy of the weights of the same experts."""
        return self.dp_shard * self.cp * self.tp // self.ep

    def by_ddp(self, *, experts: bool, exact: bool = False) -> bool:
        """Whether DDP keeps the copies of the weights: plain replicas of a model without `experts`, whose sums are not
        `exact` (FSDP2's reductions can be taken over, DDP's cannot)."""
        return self.dp_replicate == self.world > 1 and not experts and not exact

    def by_fsdp(self, *, experts: bool, exact: bool = False) -> bool:
        """Whether FSDP2 keeps the weights. A single copy is kept by nobody."""
        shared = self.dense_shard * self.dp_replicate > 1 or (experts and self.edp > 1)
        return shared and not self.by_ddp(experts=experts, exact=exact)

    def coordinate(self, rank: int) -> Coordinate:
        """Where global rank `rank` stands."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is not one of {self.world}")
        sizes, place, rest = asdict(self), {}, rank
        for axis in reversed(AXES):
            rest, place[axis] = divmod(rest, sizes[axis])
        inner = rank % prod(sizes[axis] for axis in ("dp_shard", "cp", "tp"))
        return Coordinate(**place, edp=inner // self.ep, ep=inner % self.ep)
