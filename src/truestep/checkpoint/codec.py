"""Between DCP's plan classes and JSON, and between torch dtypes and their names."""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from truestep.checkpoint.manifest import Manifest
from truestep.errors import CheckpointError

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str, tensor: str) -> torch.dtype:
    if name not in DTYPES:
        raise CheckpointError(
            f"tensor {tensor} has dtype {name}, which this torch {torch.__version__} lacks; update torch"
        )
    return DTYPES[name]


def write_data(item: WriteItem) -> TensorWriteData:
    """The tensor part of a write item; all of ours are tensors."""
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor; put plain values into extra")
    return item.tensor_data


def plan_to_json(plan: SavePlan) -> list[list[Any]]:
    rows = []
    for item in plan.items:
        data = write_data(item)
        dtype = dtype_name(data.properties.dtype)
        rows.append(
            [item.index.fqn, item.type.name, list(data.size), dtype, list(data.chunk.offsets), list(data.chunk.sizes)]
        )
    return rows


def plan_from_json(rows: list[list[Any]]) -> SavePlan:
    items = []
    for fqn, kind, shape, dtype, offsets, sizes in rows:
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            TensorProperties(dtype=dtype_of(dtype, fqn)),
            torch.Size(shape),
        )
        items.append(WriteItem(MetadataIndex(fqn, torch.Size(offsets)), WriteItemType[kind], tensor_data=data))
    return SavePlan(items)


def metadata_of(manifest: Manifest) -> Metadata:
    """DCP's view of a manifest; an alias appears as a tensor with its target's chunks."""
    found = {}
    for name in [*manifest.tensors, *manifest.aliases]:
        entry = manifest.tensors[manifest.aliases.get(name, name)]
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
        properties = TensorProperties(dtype=dtype_of(entry.dtype, name))
        found[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    return Metadata(found)
