"""Tensors of which every rank holds a piece: where each piece lies in the whole, and who answers for it.

Checkpoints, model directories, digests and first weights see a model as pieces by name, so they need to know nothing of
the mesh: neither its axes nor whether a tensor was cut by FSDP2 (a DTensor), by heads, by experts, or not at all.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # there is no public way to ask

from truestep.numerics.boxes import Box, cover_problem

_MESSAGE_BYTES = 64 << 20


def span(n: int, size: int, rank: int) -> tuple[int, int]:
    """[start, stop) of `rank`'s part of n things over `size` ranks: contiguous, as equal as can be, perhaps empty."""
    return rank * n // size, (rank + 1) * n // size


@dataclass(frozen=True)
class Split:
    """How an axis of the mesh cuts a parameter: along `dim`, `unit` neighbours (the indices of a head) together."""

    axis: Literal["tp", "ep"]
    dim: int
    unit: int = 1

    def span(self, n: int, size: int, rank: int) -> tuple[int, int]:
        """[start, stop) of n indices along `dim`: the part of `rank` of `size`. ValueError if a unit would break."""
        if n % self.unit:
            raise ValueError(f"{n} indices cannot be cut in units of {self.unit}")
        start, stop = span(n // self.unit, size, rank)
        return start * self.unit, stop * self.unit


@dataclass(frozen=True, eq=False)
class Piece:
    """A rank's part of a named tensor: `local` lies at `start` in a whole of `shape`.

    `owned`: this rank is the one that counts and saves these elements. Each element of the model has one owner, but for
    small tensors that every rank holds whole: ranks that own the same box count as one.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    owned: bool = True

    def __post_init__(self) -> None:
        sides = zip(self.start, self.local.shape, self.shape, strict=True)
        inside = all(start >= 0 and start + size <= n for start, size, n in sides)
        assert inside, (self.start, self.local.shape, self.shape)

    @property
    def box(self) -> Box:
        return Box(self.start, tuple(self.local.shape))

    @property
    def region(self) -> tuple[slice, ...]:
        """What to index the whole with for this part."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.local.shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def owned_if(self, condition: bool) -> "Piece":
        """The same for a tensor that other ranks hold too; `condition` is true on one of them."""
        return replace(self, owned=self.owned and condition)


def piece_of(x: torch.Tensor | Piece) -> Piece:
    """What this rank holds of a DTensor, in its own memory; a plain tensor is all its own. Its owner is the first of
    the ranks along each dimension of its mesh that replicates it."""
    if isinstance(x, Piece):
        return x
    plain = x.detach()
    if not isinstance(plain, DTensor):
        return Piece(plain, tuple(plain.shape), (0,) * plain.dim())
    if any(placement.is_partial() for placement in plain.placements):
        raise ValueError(f"a tensor placed as {plain.placements} is a sum that was not made yet; it has no pieces")
    sizes, offsets = compute_local_shape_and_global_offset(plain.shape, plain.device_mesh, plain.placements)
    # where nothing is held, torch's offset may lie behind the end
    start = tuple(min(offset, n - size) for offset, size, n in zip(offsets, sizes, plain.shape))
    copies = zip(plain.placements, plain.device_mesh.get_coordinate() or (), strict=True)
    owned = all(coordinate == 0 for placement, coordinate in copies if isinstance(placement, Replicate))
    return Piece(plain.to_local(), tuple(plain.shape), start, owned)


def pieces_of(tensors: Mapping[str, torch.Tensor | Piece]) -> dict[str, Piece]:
    """Every tensor as its piece, by name."""
    return {name: piece_of(tensor) for name, tensor in tensors.items()}


def find_aliases(pieces: Mapping[str, Piece]) -> dict[str, str]:
    """Names whose tensor is the same view of the same storage as an earlier name's, by that name.

    Partly overlapping views are no aliases. A piece without elements is no evidence, so the ranks that hold elements
    decide.
    """
    first: dict[tuple, str] = {}
    aliases = {}
    for name, piece in pieces.items():
        local = piece.local
        if local.numel():
            view = (local.untyped_storage().data_ptr(), local.storage_offset(), local.stride(), local.dtype)
            owner = first.setdefault((*view, piece.shape, piece.box), name)
            if owner != name:
                aliases[name] = owner
    return aliases


def place(piece: Piece, split: Split, size: int, rank: int, shape: tuple[int, ...]) -> Piece:
    """A piece of rank `rank`'s part of a split parameter (by FSDP2, or all of that part) as a piece of the whole
    parameter of `shape`. `size`: ranks along the split's axis."""
    first, stop = split.span(shape[split.dim], size, rank)
    part = tuple(stop - first if dim == split.dim else n for dim, n in enumerate(shape))
    if piece.shape != part:
        raise ValueError(f"a part of shape {list(piece.shape)} was given; {rank} of {size} holds {list(part)}")
    start = tuple(at + first if dim == split.dim else at for dim, at in enumerate(piece.start))
    return replace(piece, shape=tuple(shape), start=start)


def natural(name: str) -> list[str | int]:
    """Sorts names with their numbers as numbers, so that layer 10 follows layer 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def stream_whole(
    tensors: Mapping[str, torch.Tensor | Piece], group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Tensor after tensor in natural order of their names, each whole on rank 0 (in host memory, perhaps the live one:
    read it only) and None on the others.

    Every rank of `group` (by default the job) gives what it holds; names may differ between ranks. All of them must
    iterate to the end, whatever happens to one, since rank 0 waits for the others. No rank holds more than one whole
    tensor. ValueError on every rank if the ranks disagree about a tensor or its owned pieces are not the whole of it.
    """
    pieces = pieces_of(tensors)
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    plan = _agree(pieces, group)
    for name in plan.names:
        if rank == 0:
            yield name, _assemble(plan.parts[name], pieces.get(name), group)
        else:
            if name in plan.sends:
                _send(pieces[name].local, group)
            yield name, None


@dataclass
class _Whole:
    """A tensor that is to be put together, and the rank that each of its boxes comes from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: dict[Box, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class _Plan:
    """All names in order, those of which this rank sends its piece, and on rank 0 how each tensor is put together."""

    names: list[str]
    sends: set[str]
    parts: dict[str, _Whole]


def _agree(pieces: Mapping[str, Piece], group: dist.ProcessGroup | None) -> _Plan:
    """Rank 0 hears who holds what, and tells each rank what to send."""
    rows = [(name, piece.shape, piece.dtype, piece.box, piece.owned) for name, piece in pieces.items()]
    if not dist.is_initialized():
        parts = _merge([rows])
        return _Plan(sorted(parts, key=natural), set(), parts)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    held: list = [None] * world
    dist.gather_object(rows, held if rank == 0 else None, group=group, group_dst=0)
    parts, problem = {}, None
    if rank == 0:
        try:
            parts = _merge(held)
        except ValueError as error:
            problem = str(error)
    said = [problem or sorted(parts, key=natural)]
    dist.broadcast_object_list(said, group=group, group_src=0)
    if isinstance(said[0], str):
        raise ValueError(said[0])
    sends: list[set[str]] = [set() for _ in range(world)]
    for name, whole in parts.items():
        for source in whole.sources.values():
            sends[source].add(name)
    mine: list = [None]
    dist.scatter_object_list(mine, sends if rank == 0 else None, group=group, group_src=0)
    return _Plan(said[0], mine[0], parts)


def _merge(held: list[list[tuple[str, tuple[int, ...], torch.dtype, Box, bool]]]) -> dict[str, _Whole]:
    """Every tensor of which some rank holds a piece; of the ranks that own the same box the first is its source."""
    parts: dict[str, _Whole] = {}
    for rank, rows in enumerate(held):
        for name, shape, dtype, box, owned in rows:
            whole = parts.setdefault(name, _Whole(shape, dtype))
            if (whole.shape, whole.dtype) != (shape, dtype):
                raise ValueError(f"{name}: rank {rank} has {_Whole(shape, dtype)}, another rank {whole}")
            if owned and box.volume:
                whole.sources.setdefault(box, rank)
    for name, whole in parts.items():
        if problem := cover_problem(whole.shape, list(whole.sources)):
            raise ValueError(f"{name} {problem}")
    return parts


def _assemble(whole: _Whole, mine: Piece | None, group: dist.ProcessGroup | None) -> torch.Tensor:
    if mine is not None and whole.sources == {mine.box: 0} and mine.box.sizes == whole.shape:
        return mine.local.detach().cpu()
    out = torch.empty(whole.shape, dtype=whole.dtype)
    for box, source in whole.sources.items():
        into = out[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))]
        if source == 0:
            assert mine is not None
            into.copy_(mine.local)
        else:
            _receive(into, source, group)
    return out


def _send(local: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """To rank 0, in messages of bounded size."""
    device = _message_device(group)
    for message in local.detach().contiguous().reshape(-1).view(torch.uint8).split(_MESSAGE_BYTES):
        dist.send(message.to(device), group=group, group_dst=0)


def _receive(into: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Fill a part of a tensor in host memory with what `source` sends."""
    device = _message_device(group)
    packed = into if into.is_contiguous() else torch.empty(into.shape, dtype=into.dtype)
    for message in packed.view(-1).view(torch.uint8).split(_MESSAGE_BYTES):
        arrived = message if device.type == "cpu" else torch.empty_like(message, device=device)
        dist.recv(arrived, group=group, group_src=source)
        if arrived is not message:
            message.copy_(arrived)
    if packed is not into:
        into.copy_(packed)


def _message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Host memory, where the group can send from there."""
    on_host = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
