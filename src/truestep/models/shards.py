"""Which part of a whole tensor this rank holds."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_region(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """The rank's own memory of a DTensor and its place in the whole; a plain tensor is all its own."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, n) for n in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(start, start + n) for start, n in zip(offset, shape))


def place(tensor: torch.Tensor) -> tuple:
    """Equal for two tensors that are the same elements of the same memory."""
    if isinstance(tensor, DTensor):
        return (id(tensor),)
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
