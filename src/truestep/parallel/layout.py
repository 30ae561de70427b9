"""Where every parameter of a rank lies in the whole model, and what is missing of its gradient after backward."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from truestep.numerics.axis import Axis
from truestep.numerics.boxes import Box, Layout
from truestep.numerics.pieces import Piece, Split, piece_of
from truestep.parallel.groups import Groups
from truestep.recipe.degrees import Coordinate, Degrees

WHOLE = Axis("none")


@dataclass(frozen=True)
class Region:
    """A parameter's whole shape, and where this rank's part of it begins before FSDP2 cuts that further."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """`owned`: this rank may count the elements (of several ranks that hold them whole, one may). `missing`: the axis
    over which gradients are still to be summed after backward."""

    region: Region
    owned: bool
    missing: Axis

    def piece(self, tensor: torch.Tensor) -> Piece:
        """The piece that `tensor` is: the parameter or its gradient, as FSDP2's DTensor or plain."""
        found = piece_of(tensor)
        start = tuple(a + b for a, b in zip(self.region.start, found.start, strict=True))
        return replace(found, shape=self.region.shape, start=start, owned=found.owned and self.owned)


def cut(model: nn.Module, splits: Mapping[str, Split], axes: Mapping[str, Axis]) -> dict[str, Region]:
    """Give each split parameter of a model on the meta device the shape of this rank's part. Regions of all by name."""
    regions = {}
    for name, parameter in list(model.named_parameters()):
        shape, split = tuple(parameter.shape), splits.get(name)
        start = [0] * len(shape)
        if split is not None and axes[split.axis].size > 1:
            axis = axes[split.axis]
            first, stop = split.span(shape[split.dim], axis.size, axis.rank)
            start[split.dim] = first
            part = [stop - first if dim == split.dim else n for dim, n in enumerate(shape)]
            path, _, last = name.rpartition(".")
            assert parameter.is_meta, f"{name} has memory already"
            mine = torch.empty(part, dtype=parameter.dtype, device="meta")
            setattr(model.get_submodule(path), last, nn.Parameter(mine, parameter.requires_grad))
        regions[name] = Region(shape, tuple(start))
    return regions


def places(
    regions: Mapping[str, Region], splits: Mapping[str, Split], groups: Groups, unsharded: Collection[str]
) -> dict[str, Place]:
    """Places of parameters by name. `unsharded` names those that FSDP2 leaves whole on ranks with different data."""
    found = {}
    for name, region in regions.items():
        split = splits.get(name)
        if split is not None and split.axis == "ep":
            found[name] = Place(region, True, WHOLE)  # tp is one more data axis of experts, inside FSDP2's mesh
        elif name in unsharded:
            missing = groups.stage if split is None else groups.across
            found[name] = Place(region, missing.rank == 0, missing)
        else:
            tp = groups.axes.tp
            found[name] = Place(region, split is not None or tp.rank == 0, WHOLE if split is not None else tp)
    return found


def layouts(
    parameters: Mapping[str, nn.Parameter], places: Mapping[str, Place], splits: Mapping[str, Split], groups: Groups
) -> dict[str, Layout]:
    """What each rank of this rank's pipeline stage holds of every parameter, by name; computed, not asked for."""
    found = {}
    for name, parameter in parameters.items():
        shards = parameter.placements if isinstance(parameter, DTensor) else ()
        dim = next((shard.dim for shard in shards if isinstance(shard, Shard)), None)
        found[name] = _layout(places[name].region.shape, splits.get(name), dim, groups.degrees)
        mine, computed = places[name].piece(parameter).box, found[name].boxes[groups.stage.rank]
        assert mine == computed or not mine.volume + computed.volume, (name, mine, computed)
    return found


@cache
def _layout(shape: tuple[int, ...], split: Split | None, dim: int | None, degrees: Degrees) -> Layout:
    """Of a parameter that an axis splits, and FSDP2 shards along `dim`."""
    ranks = range(degrees.world // degrees.pp)
    return Layout(shape, tuple(_box(shape, split, dim, degrees, degrees.coordinate(rank)) for rank in ranks))


def _box(shape: tuple[int, ...], split: Split | None, dim: int | None, degrees: Degrees, at: Coordinate) -> Box:
    start, stop = [0] * len(shape), list(shape)
    expert = split is not None and split.axis == "ep"
    if split is not None:
        size, rank = (degrees.ep, at.ep) if expert else (degrees.tp, at.tp)
        start[split.dim], stop[split.dim] = split.span(shape[split.dim], size, rank)
    if dim is not None:
        shards, shard = (degrees.edp, at.edp) if expert else (degrees.dense_shard, at.dp_shard * degrees.cp + at.cp)
        size = -(-(stop[dim] - start[dim]) // shards)  # as torch's chunk: the last ones may be smaller or empty
        start[dim] = min(start[dim] + shard * size, stop[dim])
        stop[dim] = min(start[dim] + size, stop[dim])
    return Box(tuple(start), tuple(b - a for a, b in zip(start, stop)))
