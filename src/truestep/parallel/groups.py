"""Degrees made process groups: this rank's place on every axis, and the meshes over which FSDP2 shards.

Rank order, outermost first: pp, dp_replicate, dp_shard, cp, tp. The expert axis is folded into the inner three: their
ranks, in order, form (edp, ep).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

from truestep.numerics.axis import Axes, Axis
from truestep.recipe.degrees import Degrees
from truestep.recipe.machine import Context


@dataclass(frozen=True)
class Groups:
    """A rank's groups. `dense` and `expert` are meshes (dp_replicate, shard) of FSDP2 for weights of each kind.
    `stage`: all ranks of this rank's pipeline stage, which see all data between them. `across`: those of them that see
    other data for the same part of weights that tp splits. A job of one rank has no groups."""

    degrees: Degrees
    axes: Axes = field(default_factory=Axes)
    pp: Axis = field(default_factory=lambda: Axis("pp"))
    stage: Axis = field(default_factory=lambda: Axis("stage"))
    across: Axis = field(default_factory=lambda: Axis("across"))
    world: Axis = field(default_factory=lambda: Axis("world"))
    dense: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    data_rank: int = 0

    @property
    def data_size(self) -> int:
        """How many ways rows are shared out."""
        return self.degrees.data_parallel


def make_groups(degrees: Degrees, device: torch.device, context: Context | None = None) -> Groups:
    """Join the groups of `degrees`; every rank of the job calls this at the same time. Axes over the same ranks share
    one group: each costs threads, memory and connections."""
    d = degrees
    if d.world == 1:
        return Groups(d)
    ranks = torch.arange(d.world)
    fine = ranks.view(d.pp, d.dp_replicate, d.dp_shard, d.cp, d.tp)
    experts = ranks.view(d.pp, d.dp_replicate, d.edp, d.ep)
    at = d.coordinate(dist.get_rank())
    pp, replica, shard, cp, tp = at[:5]
    made = {tuple(range(d.world)): dist.group.WORLD}

    def axis(name: str, members: torch.Tensor) -> Axis:
        listed = members.flatten().tolist()
        group = _group(name, listed, made) if len(listed) > 1 else None
        return Axis(name, len(listed), listed.index(dist.get_rank()), group)

    def mesh(name: str, members: torch.Tensor) -> DeviceMesh:
        """Of FSDP2, (replicas, shards): one dimension where there is one replica."""
        mine = (members == dist.get_rank()).nonzero()[0].tolist()
        sharing = _group(name, members[mine[0]].tolist(), made)
        if d.dp_replicate == 1:
            return DeviceMesh.from_group(sharing, device.type, mesh=members[0], mesh_dim_names=(name,))
        copies = _group("dp_replicate", members[:, mine[1]].tolist(), made)
        names = ("dp_replicate", name)
        return DeviceMesh.from_group([copies, sharing], device.type, mesh=members, mesh_dim_names=names)

    dense = fine[pp, :, :, :, tp].flatten(1)
    return Groups(
        d,
        Axes(
            axis("tp", fine[pp, replica, shard, cp]),
            axis("cp", fine[pp, replica, shard, :, tp]),
            axis("ep", experts[pp, replica, at.edp]),
            context or Context(),
        ),
        axis("pp", fine[:, replica, shard, cp, tp]),
        axis("stage", fine[pp]),
        axis("across", dense),
        axis("world", ranks),
        mesh("dense", dense),
        mesh("expert", experts[pp, :, :, at.ep]) if d.ep > 1 or d.tp > 1 else mesh("dense", dense),
        replica * d.dp_shard + shard,
    )


def _group(name: str, ranks: list[int], made: dict[tuple[int, ...], Any]) -> Any:
    """The group of these ranks, made once; profiles name it by the first axis that it serves. Only they take part in
    making it."""
    key = tuple(ranks)
    if key not in made:
        made[key] = dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
    return made[key]


def forget_meshes() -> None:
    """Before this process takes another place in a new job: DTensor caches what it worked out for a mesh by the mesh's
    ranks, not by which of them this process was. An equal mesh would get the old place, and groups that are gone.
    """
    _clear_python_sharding_prop_cache()
    _clear_fast_path_sharding_prop_cache()
