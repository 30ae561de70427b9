"""Degrees made process groups: this rank's place on every axis, and the meshes over which FSDP2 shards.

Rank order, outermost first: pp, dp_replicate, dp_shard, cp, tp. The expert axis is folded into the inner three: their
ranks, in order, form (edp, ep).
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    replica: int = 0
    shard: int = 0

    @property
    def data_size(self) -> int:
        """How many ways rows are shared out."""
        return self.degrees.data_parallel


def make_groups(degrees: Degrees, device: torch.device, context: Context | None = None) -> Groups:
    """Join the groups of `degrees`; every rank of the job calls this at the same time."""
    if degrees.world == 1:
        return Groups(degrees)
    d = degrees
    sizes = {
        "dense": (("pp", "dp_replicate", "dense", "tp"), (d.pp, d.dp_replicate, d.dense_shard, d.tp)),
        "fine": (("pp", "data", "cp", "tp"), (d.pp, d.data_parallel, d.cp, d.tp)),
        "expert": (("pp", "dp_replicate", "edp", "ep"), (d.pp, d.dp_replicate, d.edp, d.ep)),
        "across": (("pp", "across", "tp"), (d.pp, d.dp_replicate * d.dense_shard, d.tp)),
        "stage": (("pp", "stage"), (d.pp, d.world // d.pp)),
    }
    meshes = {key: init_device_mesh(device.type, shape, mesh_dim_names=names) for key, (names, shape) in sizes.items()}

    def axis(mesh: str, dim: str) -> Axis:
        one = meshes[mesh]
        size = one.size(one.mesh_dim_names.index(dim))  # pyright: ignore[reportOptionalMemberAccess]
        return Axis(dim, size, one.get_local_rank(dim), one.get_group(dim) if size > 1 else None)

    return Groups(
        degrees,
        Axes(axis("dense", "tp"), axis("fine", "cp"), axis("expert", "ep"), context or Context()),
        axis("fine", "pp"),
        axis("stage", "stage"),
        axis("across", "across"),
        Axis("world", d.world, dist.get_rank(), dist.group.WORLD),
        meshes["dense"]["dp_replicate", "dense"] if d.dp_replicate > 1 else meshes["dense"]["dense"],
        meshes["expert"]["dp_replicate", "edp"] if d.dp_replicate > 1 else meshes["expert"]["edp"],
        meshes["fine"].get_local_rank("data"),
        meshes["dense"].get_local_rank("dp_replicate"),
        meshes["dense"].get_local_rank("dense"),
    )
