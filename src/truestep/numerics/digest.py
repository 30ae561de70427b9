"""Digests of raw bits: equal only if every bit is, so NaN payloads and -0.0 count."""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from truestep.numerics.pieces import Piece, stream_whole

_BLOCK_BYTES = 16 << 20

assert sys.byteorder == "little", "truestep stores and compares little-endian bytes"


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor in row order, without a copy."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128 (hex) over dtype, shape and little-endian bytes of a whole tensor."""
    digest = xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(raw_bytes(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


def state_digest(tensors: Mapping[str, torch.Tensor | Piece], group: dist.ProcessGroup | None = None) -> str:
    """xxh3-128 (hex) over names and tensor digests, whatever the order of the mapping and however the tensors are cut.

    Every rank of `group` (by default the job) gives what it holds and is told the result.
    """
    parts = {name: tensor_digest(whole) for name, whole in stream_whole(tensors, group) if whole is not None}
    said = [digest_of(parts)]
    if dist.is_initialized():
        dist.broadcast_object_list(said, group=group, group_src=0)
    return said[0]


def digest_of(parts: Mapping[str, str]) -> str:
    """The same from the digests of the tensors by name."""
    digest = xxhash.xxh3_128()
    for name in sorted(parts):
        digest.update(f"{name} {parts[name]}\n".encode())
    return digest.hexdigest()


def files_digest(directory: Path) -> str:
    """xxh3-128 (hex) over the names and bytes of a model directory's weights, as they are on disk."""
    digest = xxhash.xxh3_128()
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
