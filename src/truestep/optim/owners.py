"""Work on whole matrices whose shards lie on many ranks: each matrix goes to one owner and its result comes back.

A matrix lives on a grid of replicas x shards. Its owner is one rank of the grid, (replica, shard) = divmod(owner,
number of shards). Within the owner's replica the shards travel to it and back in one all-to-all each way; then that
replica's ranks pass the result to their peers in the other replicas.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

_BUCKET_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Matrix:
    """One matrix of a bucket: whole shape, dimension that is sharded, owner."""

    shape: torch.Size
    dim: int
    owner: int

    def part(self, shard: int, num_shards: int) -> torch.Size:
        """Shape of the part of one shard: pieces of ceil(size / shards), the last ones shorter or empty."""
        size = self.shape[self.dim]
        piece = -(-size // num_shards)
        rest = max(0, min(piece, size - shard * piece))
        return torch.Size(rest if dim == self.dim else n for dim, n in enumerate(self.shape))


@dataclass(frozen=True)
class Home:
    """The grid on which a parameter lives. A group is None where that side of the grid has one rank."""

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    dim: int = 0

    @property
    def num_shards(self) -> int:
        return self.shards.size() if self.shards else 1

    @property
    def num_replicas(self) -> int:
        return self.replicas.size() if self.replicas else 1

    @property
    def num_ranks(self) -> int:
        return self.num_shards * self.num_replicas

    def matrix(self, param: torch.Tensor, owner: int) -> Matrix:
        return Matrix(param.shape, self.dim, owner)

    def on_owners(
        self, matrices: Sequence[Matrix], parts: Sequence[torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Apply `work` (whole matrix -> matrix of the same shape and dtype) on the owners. `parts`: this rank's shards;
        returned are this rank's shards of the results. A collective over the grid."""
        of_replica = [
            [i for i, m in enumerate(matrices) if m.owner // self.num_shards == r] for r in range(self.num_replicas)
        ]
        mine = of_replica[self.replicas.rank() if self.replicas else 0]
        results = list(parts)
        for i, result in zip(mine, self._within_replica([matrices[i] for i in mine], [parts[i] for i in mine], work)):
            results[i] = result
        if self.replicas:
            for source, some in enumerate(of_replica):
                for i, result in zip(some, _broadcast([results[i] for i in some], source, self.replicas)):
                    results[i] = result
        return results

    def _within_replica(
        self, matrices: Sequence[Matrix], parts: Sequence[torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        if self.shards is None:
            return [work(part) for part in parts]
        if not matrices:
            return []
        num, rank = self.num_shards, self.shards.rank()
        owned_by = [[i for i, m in enumerate(matrices) if m.owner % num == shard] for shard in range(num)]
        mine = owned_by[rank]
        sent = [[matrices[i].part(rank, num) for i in owned] for owned in owned_by]
        received = [[matrices[i].part(shard, num) for i in mine] for shard in range(num)]
        gathered = _exchange([parts[i] for owned in owned_by for i in owned], sent, received, self.shards)
        done = [work(torch.cat(pieces, matrices[i].dim)) for i, pieces in zip(mine, zip(*gathered))]
        pieces = [_split(x, matrices[i], num) for x, i in zip(done, mine)]
        back = [piece[shard] for shard in range(num) for piece in pieces]
        returned = _exchange([parts[0].new_empty(0), *back], received, sent, self.shards)
        results = list(parts)
        for owned, tensors in zip(owned_by, returned):
            for i, tensor in zip(owned, tensors):
                results[i] = tensor
        return results


def home_of(param: torch.Tensor, replicas: dist.ProcessGroup | None) -> Home:
    """Where a parameter lives. `replicas` holds for plain tensors. At most one mesh dimension may shard it, and at most
    one may replicate it (a dimension of one rank does not count)."""
    if not isinstance(param, DTensor):
        return Home(None, replicas if replicas and replicas.size() > 1 else None)
    mesh, dim = param.device_mesh, 0
    shards: list[dist.ProcessGroup] = []
    copies: list[dist.ProcessGroup] = []
    for mesh_dim, placement in enumerate(param.placements):
        if mesh.size(mesh_dim) == 1:
            continue
        if isinstance(placement, Replicate):
            copies.append(mesh.get_group(mesh_dim))
        elif type(placement) is Shard:
            shards.append(mesh.get_group(mesh_dim))
            dim = placement.dim
        else:
            raise NotImplementedError(f"a matrix placed as {placement} has no single grid of replicas and shards")
    if len(shards) > 1 or len(copies) > 1:
        raise NotImplementedError(f"a matrix placed as {param.placements} has no single grid of replicas and shards")
    return Home(shards[0] if shards else None, copies[0] if copies else None, dim)


def buckets(
    shapes: Sequence[torch.Size], num_ranks: int, cost: Callable[[torch.Size], int]
) -> list[list[tuple[int, int]]]:
    """(index, owner) of all matrices, in buckets that bound the memory in flight: at least one matrix a rank, at most
    2^26 elements beyond that. Within a bucket the dearest matrix first goes to the rank with the least to do. The same
    on all ranks."""
    found: list[list[tuple[int, int]]] = []
    load = [0] * num_ranks
    elements = 0
    for i in sorted(range(len(shapes)), key=lambda i: (-cost(shapes[i]), i)):
        if not found or (elements + shapes[i].numel() > _BUCKET_ELEMENTS and len(found[-1]) >= num_ranks):
            found.append([])
            elements = 0
        owner = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        load[owner] += cost(shapes[i])
        elements += shapes[i].numel()
        found[-1].append((i, owner))
    return found


def _split(whole: torch.Tensor, matrix: Matrix, num_shards: int) -> list[torch.Tensor]:
    sizes = [matrix.part(shard, num_shards)[matrix.dim] for shard in range(num_shards)]
    return list(whole.split(sizes, matrix.dim))


def _exchange(
    tensors: list[torch.Tensor],
    to_each: list[list[torch.Size]],
    from_each: list[list[torch.Size]],
    group: dist.ProcessGroup,
) -> list[list[torch.Tensor]]:
    """All-to-all of lists of tensors through one flat buffer; `tensors` lie in the order of their targets."""
    sent, received = ([sum(shape.numel() for shape in shapes) for shapes in side] for side in (to_each, from_each))
    outgoing = torch.cat([x.reshape(-1) for x in tensors])
    incoming = outgoing.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
    return [_unflat(x, shapes) for x, shapes in zip(incoming.split(received), from_each)]


def _broadcast(tensors: list[torch.Tensor], source: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    if not tensors:
        return []
    flat = torch.cat([x.reshape(-1) for x in tensors])
    dist.broadcast(flat, group=group, group_src=source)
    return _unflat(flat, [x.shape for x in tensors])


def _unflat(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
