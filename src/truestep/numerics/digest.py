"""Digests of raw bits: equal only if every bit is, so NaN payloads and -0.0 count."""

import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
import xxhash

from truestep.numerics.pieces import Piece, stream_whole

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
    digest = xxhash.xxh3_128()
    for name in sorted(parts):
        digest.update(f"{name} {parts[name]}\n".encode())
    said = [digest.hexdigest()]
    if dist.is_initialized():
        dist.broadcast_object_list(said, group=group, group_src=0)
    return said[0]
