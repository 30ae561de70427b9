"""Where every parameter of a rank lies in the whole model, and what is missing of its gradient after backward."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from truestep.numerics.axis import Axis
from truestep.numerics.pieces import Piece, Split, piece_of
from truestep.parallel.groups import Groups

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
            setattr(
                model.get_submodule(path), last, nn.Parameter(torch.empty(part, dtype=parameter.dtype, device="meta"))
            )
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
