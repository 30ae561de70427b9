"""Plain torch.distributed.checkpoint directories of others, read without running anything that is in them.

`.metadata` is a pickle: it is read by an unpickler that knows DCP's metadata classes and nothing else. Tensors are read
by torch.load(weights_only=True). Such checkpoints carry no checksums, so damage to them cannot be noticed here.
"""

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from truestep.checkpoint.codec import DTYPES, dtype_name
from truestep.checkpoint.plans import PiecePlanner
from truestep.errors import CheckpointError
from truestep.numerics.pieces import Piece, pieces_of

_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name): vars(metadata)[name]
    for name in (
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
}  # fmt: skip
_CLASSES |= {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): vars(filesystem)["_StorageInfo"],
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
}
_CLASSES |= {("torch", name): dtype for name, dtype in DTYPES.items()}
"""Every global that a pickled Metadata may name. All are inert: making one runs no code of the file's choosing."""


class _Unpickler(pickle._Unpickler):
    """The unpickler written in Python, since its steps can be restricted."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)  # pyright: ignore

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in checkpoint metadata")
        return _CLASSES[module, name]

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # pyright: ignore[reportAttributeAccessIssue]
            raise pickle.UnpicklingError("it tries to change a class")
        super().load_build()  # pyright: ignore[reportAttributeAccessIssue]

    dispatch[pickle.BUILD[0]] = load_build


def read_metadata(folder: str | os.PathLike) -> Metadata:
    """The metadata of a DCP directory; CheckpointError if it is absent, damaged or names anything unexpected."""
    path = Path(folder) / ".metadata"
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); name a folder written by DCP") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: refused, because {error}; only plain DCP metadata is read") from None
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, not DCP metadata")
    for info in (found.storage_data or {}).values():
        if "/" in info.relative_path:
            raise CheckpointError(f"{path}: refused, because it points to {info.relative_path}, outside its own folder")
    return found


class _Reader(filesystem.FileSystemReader):
    """DCP's file reader behind our way of reading `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self.path)


def import_dcp(folder: str | Path, tensors: Mapping[str, torch.Tensor | Piece]) -> list[str]:
    """Fill `tensors` (plain, DTensors or pieces, any mesh) from a DCP directory; returns the stored names that are not
    among them.

    Names are DCP's own flattened ones ("model.layers.0.weight"). CheckpointError for a missing name, another shape or
    dtype (DCP would convert in silence), or unreadable files; no tensor changes before everything was read.
    """
    stored, pieces = read_metadata(folder), pieces_of(tensors)
    for name, piece in pieces.items():
        entry = stored.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{folder}: holds no tensor {name}")
        have = f"{dtype_name(entry.properties.dtype)} {list(entry.size)}"
        want = f"{dtype_name(piece.dtype)} {list(piece.shape)}"
        if have != want:
            raise CheckpointError(f"{folder}: {name} is saved as {have}, but {want} is wanted")
    reader = _Reader(folder)
    try:
        read = {name: replace(piece, local=torch.empty_like(piece.local.detach())) for name, piece in pieces.items()}
        planner = PiecePlanner(read, stored)
        reader.set_up_storage_reader(stored, is_coordinator=False)
        reader.read_data(_tensors_only(planner.create_local_plan()), planner).wait()
    except (CheckpointException, Exception) as error:
        raise CheckpointError(f"{folder}: cannot be read as a DCP checkpoint: {error}") from None
    with torch.no_grad():
        for name, piece in pieces.items():
            piece.local.copy_(read[name].local)
    return sorted(stored.state_dict_metadata.keys() - pieces.keys())


def names(folder: str | Path) -> dict[str, tuple[tuple[int, ...], str] | None]:
    """What a DCP directory holds: shape and dtype of tensors, None for pickled objects, which are never read."""
    found: dict[str, tuple[tuple[int, ...], str] | None] = {}
    for name, entry in read_metadata(folder).state_dict_metadata.items():
        is_object = isinstance(entry, BytesStorageMetadata)
        found[name] = None if is_object else (tuple(entry.size), dtype_name(entry.properties.dtype))
    return found


def _tensors_only(plan: LoadPlan) -> LoadPlan:
    """Pickled objects have no way in, whatever the metadata says."""
    if any(item.type != LoadItemType.TENSOR for item in plan.items):
        raise CheckpointError("it holds a pickled object under the name of a tensor")
    return plan
