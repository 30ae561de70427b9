"""Exact reduction put into a model that was made parallel."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from truestep.numerics.axis import Axis
from truestep.parallel.exact import Exact
from truestep.parallel.exact_bucket import Route
from truestep.parallel.exact_shards import shard_exactly
from truestep.parallel.model import Parallel


def reduce_exactly(
    parallel: Parallel,
    names: Sequence[str],
    control: dist.ProcessGroup | None,
    *,
    once_a_step: bool = False,
    ties: Mapping[str, tuple[str, Axis]] | None = None,
) -> Exact:
    """Take all sums of gradients of a parallel model over. Its parameters have memory; no DDP is around it.

    `names`: of all parameters of the whole model, in one order. `once_a_step`: as in `shard_exactly`. `ties`: for a
    parameter here of which other pipeline stages have further uses, its name in the whole model and the axis that joins
    these stages, whose rank 0 counts it.
    """
    exact = Exact(names, device=parallel.device, control=control, probe=parallel.probe)
    ties = ties or {}
    named = {name: p for name, p in parallel.bare.named_parameters() if p.requires_grad}
    known_as = {name: ties[name][0] if name in ties else name for name in named}
    routes = {known_as[name]: _route(parallel, name, p, ties) for name, p in named.items()}
    shard_exactly(exact, parallel.bare, routes.__getitem__, once_a_step=once_a_step, known_as=known_as.__getitem__)
    plain = {known_as[name]: p for name, p in named.items() if not isinstance(p, DTensor)}
    if plain:
        exact.watch(plain, routes.__getitem__)
    return exact


def _route(parallel: Parallel, name: str, parameter: torch.nn.Parameter, ties: Mapping[str, tuple[str, Axis]]) -> Route:
    """Copies on other replicas, what the model's place says is missing, then other uses on other stages."""
    place = parallel.places[name]
    groups = []
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        copies = [dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Replicate)]
        groups += [mesh.get_group(dim) for dim in copies if mesh.size(dim) > 1]
    groups += [place.missing.group] if place.missing.group is not None else []
    owned = place.piece(parameter).owned
    if name in ties:
        axis = ties[name][1]
        groups += [axis.group] if axis.group is not None else []
        owned = owned and axis.rank == 0
    return Route(tuple(groups), owned)
