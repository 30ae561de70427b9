"""DCP's planners over pieces: which box of which tensor a rank writes or reads, on any mesh."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from truestep.checkpoint.codec import write_data
from truestep.errors import CheckpointError
from truestep.numerics.boxes import Box, cover_problem
from truestep.numerics.pieces import Piece


class StagedPlanner(DefaultSavePlanner):
    """Plans by where the live pieces lie; the bytes come from the staged copies."""

    def __init__(self, pieces: Mapping[str, Piece], staged: Mapping[str, torch.Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces, self.staged = pieces, staged

    @property
    def copies(self) -> list[str]:
        """Names of which another rank owns what this one holds."""
        return [name for name, piece in self.pieces.items() if not piece.owned]

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, piece) for name, piece in self.pieces.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.staged[index.fqn]


class PiecePlanner(DefaultLoadPlanner):
    """Reads what fills the pieces, in place."""

    def __init__(self, pieces: Mapping[str, Piece], stored: Metadata):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces, self.stored = pieces, stored

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, piece in self.pieces.items():
            entry = self.stored.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata), name
            if piece.local.numel():
                items += create_read_items_for_chunk_list(name, entry, [_chunk(piece.box)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.pieces[index.fqn].local


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _write_item(name: str, piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=piece.dtype)
    data = TensorWriteData(_chunk(piece.box), properties, torch.Size(piece.shape))
    return WriteItem(MetadataIndex(name, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def owned_plans(plans: Sequence[SavePlan], copies: Sequence[Collection[str]]) -> list[SavePlan]:
    """What may be saved of the plans of all ranks: every box that some rank owns, from all ranks that hold it, so that
    the work can be shared out. `copies`: of each rank the names of which it owns nothing.

    CheckpointError unless the owned boxes of every tensor that any rank holds are exactly the whole of it.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    owned: dict[str, set[Box]] = {}
    for plan, not_mine in zip(plans, map(set, copies), strict=True):
        for item in plan.items:
            shapes[item.index.fqn] = tuple(write_data(item).size)
            boxes = owned.setdefault(item.index.fqn, set())
            if item.index.fqn not in not_mine:
                boxes.add(_box_of(item))
    for name, boxes in owned.items():
        if problem := cover_problem(shapes[name], list(boxes)):
            raise CheckpointError(f"{name} {problem}")
    return [SavePlan([item for item in plan.items if _box_of(item) in owned[item.index.fqn]]) for plan in plans]


def _box_of(item: WriteItem) -> Box:
    chunk = write_data(item).chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))
