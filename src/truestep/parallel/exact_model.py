"""Exact reduction put into a model that was made parallel."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from truestep.numerics.exact_collectives import send_integers
from truestep.parallel.exact import Exact
from truestep.parallel.exact_bucket import Route
from truestep.parallel.exact_shards import shard_exactly
from truestep.parallel.model import MIRROR, Mirror, Parallel


def reduce_exactly(
    parallel: Parallel,
    names: Sequence[str],
    control: dist.ProcessGroup | None,
    *,
    tied: str | None = None,
    once_a_step: bool = False,
) -> Exact:
    """Take over all sums of gradients of a parallel model, whose parameters have memory; no DDP is around it.

    `names`: of all parameters of the whole model, in one order. `tied`: the name of a table that is the head's too; of
    a copy of it elsewhere in a pipeline the gradient ends as zero. `once_a_step`: as in `shard_exactly`.
    """
    uses = {MIRROR: tied} if tied else {}
    exact = Exact(names, device=parallel.device, control=control, probe=parallel.probe, uses=uses)
    named = {name: p for part in parallel.parts for name, p in part.named_parameters() if p.requires_grad}
    routes = {name: _route(parallel, name, parameter) for name, parameter in named.items()}
    for part in parallel.parts:
        shard_exactly(exact, part, routes.__getitem__, once_a_step=once_a_step)
    plain = {name: parameter for name, parameter in named.items() if not isinstance(parameter, DTensor)}
    if plain:
        exact.watch(plain, routes.__getitem__)
    if parallel.mirror is not None and tied is not None:
        mirror = parallel.mirror
        exact.join(lambda: _join(exact, mirror, tied))
    return exact


def _route(parallel: Parallel, name: str, parameter: torch.nn.Parameter) -> Route:
    """First the copies of shards on other replicas, then what the parameter's place says is missing."""
    place = parallel.places[name]
    groups = []
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        copies = [dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Replicate)]
        groups += [mesh.get_group(dim) for dim in copies if mesh.size(dim) > 1]
    groups += [place.missing.group] if place.missing.group is not None else []
    return Route(tuple(groups), name != MIRROR and place.piece(parameter).owned)


def _join(exact: Exact, mirror: Mirror, tied: str) -> None:
    """Bring the integers of the copy of a tied table, a use of its own, to those of the table."""
    here = exact.integers(tied) if mirror.owner is not None else None
    there = exact.integers(MIRROR) if mirror.copy is not None else None
    source, target = mirror.ranks[1], mirror.ranks[0]
    group = mirror.axis.group
    if here is not None and there is not None:
        here += there
    elif group is not None and here is not None:
        arrived = torch.empty_like(here)
        exact.scales.residual += send_integers(arrived, group, source, target, exact.scales.trail)
        here += arrived
    elif group is not None and there is not None:
        exact.scales.residual += send_integers(there, group, source, target, exact.scales.trail)
    if there is not None:
        there.zero_()
