"""Digests see every bit, and nothing else."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist import run_ranks
from truestep.numerics.digest import state_digest, tensor_digest
from truestep.numerics.pieces import Split, piece_of, place


def _bits(pattern: int) -> torch.Tensor:
    return torch.from_numpy(np.array([pattern], dtype=np.uint32).view(np.float32).copy())


def test_c51_raw_bits_decide():
    """Equal NaN payloads are equal, other payloads and the sign of zero are not; a last bit counts."""
    assert tensor_digest(_bits(0x7FC00001)) == tensor_digest(_bits(0x7FC00001))
    assert tensor_digest(_bits(0x7FC00001)) != tensor_digest(_bits(0x7FC00002))
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    assert tensor_digest(torch.tensor([1.0])) != tensor_digest(torch.tensor([1.0000001]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_every_dtype_shape_and_layout(dtype):
    grid = torch.arange(12).reshape(3, 4).to(dtype)
    assert tensor_digest(grid) == tensor_digest(grid.t().contiguous().t()), "layout in memory does not count"
    assert tensor_digest(grid) != tensor_digest(grid.reshape(4, 3))
    assert tensor_digest(torch.zeros((), dtype=dtype)) != tensor_digest(torch.zeros(1, dtype=dtype))
    assert len(tensor_digest(torch.zeros(0, dtype=dtype))) == 32


def test_state_digest_goes_by_name():
    a, b = torch.ones(2), torch.zeros(2)
    assert state_digest({"a": a, "b": b}) == state_digest({"b": b, "a": a.clone().requires_grad_()})
    assert state_digest({"a": a, "b": b}) != state_digest({"a": b, "b": a})
    assert state_digest({"a": a}) != state_digest({"a": a, "b": b})


def _sharded(rank, world):
    """The same state cut by FSDP2, by heads, and by layers (the names of a pipeline's parts)."""
    whole = _state()
    mesh = init_device_mesh("cpu", (world,))
    rows = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}
    split, columns = Split("tp", 1, unit=2), {}
    for name, value in whole.items():
        first, stop = split.span(value.shape[1], world, rank)
        columns[name] = place(piece_of(value[:, first:stop]), split, world, rank, tuple(value.shape))
    layers = {name: value for index, (name, value) in enumerate(whole.items()) if index % world == rank}
    return {state_digest(tensors) for tensors in (whole, rows, columns, layers)}


def _state():
    names = [f"blocks.{layer}.up" for layer in range(11)]
    return {name: torch.arange(20.0).reshape(5, 4) + index for index, name in enumerate(names)}


def test_every_layout_has_the_digest_of_the_whole():
    assert set().union(*run_ranks(_sharded, 3)) == {state_digest(_state())}


def test_the_digest_stays_what_older_versions_recorded():
    assert state_digest(_state()) == "8d679e6e48db6debb4f61ccc960ae6ec"
