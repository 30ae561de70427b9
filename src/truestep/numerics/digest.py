"""Digests of raw bits: equal only if every bit is, so NaN payloads and -0.0 count."""

import sys
from collections.abc import Mapping

import torch
import xxhash
from torch.distributed.tensor import DTensor

assert sys.byteorder == "little", "truestep stores and compares little-endian bytes"


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor in row order, without a copy."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128 (hex) over dtype, shape and little-endian bytes.

    A DTensor is gathered first, which is a collective: every rank of its mesh calls this.
    """
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    digest = xxhash.xxh3_128(f"{whole.dtype} {list(whole.shape)} ".encode())
    digest.update(raw_bytes(whole.cpu().contiguous()))
    return digest.hexdigest()


def state_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """xxh3-128 (hex) over names and tensor digests, whatever the order of the mapping."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(f"{name} {tensor_digest(tensors[name])}\n".encode())
    return digest.hexdigest()
