"""Copies of the same weights on several ranks: whether they have the same bits, and if not, who is the odd one.

Along every axis that copies a tensor one all-reduce of a few integers tells whether all agree. Only if not do the ranks
say more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate

from truestep.numerics.axis import Axis
from truestep.numerics.boxes import Box
from truestep.numerics.pieces import natural
from truestep.parallel.job import Job
from truestep.parallel.model import Parallel


@dataclass(frozen=True)
class Copies:
    """What the ranks say of one box of a tensor: a digest of its bits from each rank of the job that holds it."""

    name: str
    said: dict[int, int]


def copying_axes(parallel: Parallel) -> dict[str, list[Axis]]:
    """By the name of each parameter of this rank, the axes along which others hold the very same part of it."""
    groups, found = parallel.groups, {}
    for name, parameter in parallel.named_parameters().items():
        place, axes = parallel.places[name], []
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            copied = [dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Replicate)]
            axes = [
                Axis("dp_replicate", mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim)) for dim in copied
            ]
        elif place.missing.size == 1 and groups.degrees.dp_replicate == groups.degrees.world:
            axes = [groups.world]  # DDP has summed all there is to sum
        found[name] = [axis for axis in (*axes, place.missing) if axis.size > 1]
    return found


def differing(digests: Mapping[str, torch.Tensor], axes: Mapping[str, Sequence[Axis]]) -> list[str]:
    """Names of tensors of which this rank's copy and another one are not the same. `digests`: int64 scalars; `axes`:
    where there are copies; names and axes are alike on all ranks of an axis. Collective."""
    by_axis: dict[tuple, tuple[Axis, list[str]]] = {}
    for name in digests:
        for axis in axes.get(name, ()):
            by_axis.setdefault((axis.name, id(axis.group)), (axis, []))[1].append(name)
    found: set[str] = set()
    for axis, names in by_axis.values():
        mine = torch.stack([digests[name] for name in names])
        both = axis.max_(torch.cat((mine, ~mine)))  # ~x falls as x grows: one maximum is of x, the other the minimum
        unlike = (both[: len(names)] != ~both[len(names) :]).tolist()
        found |= {name for name, differs in zip(names, unlike) if differs}
    return sorted(found, key=natural)


def compare(
    names: Sequence[str], boxes: Mapping[str, Box], digests: Mapping[str, torch.Tensor], job: Job
) -> list[Copies]:
    """Once some rank has found copies that differ (`names`, its own findings): all copies of those tensors on all
    ranks, in natural order of their names. Collective over the job."""
    wanted = sorted({name for each in job.everybody(list(names)) for name in each}, key=natural)
    mine = [(name, boxes[name], int(digests[name])) for name in wanted if name in digests]
    copies: dict[tuple[str, Box], Copies] = {}
    for rank, rows in enumerate(job.everybody(mine)):
        for name, box, digest in rows:
            copies.setdefault((name, box), Copies(name, {})).said[rank] = digest
    return [each for _, each in sorted(copies.items(), key=lambda pair: natural(pair[0][0])) if len(each.said) > 1]
