"""State and helpers that the checkpoint tests share."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from truestep.checkpoint.catalogue import begin_epoch
from truestep.checkpoint.checkpointer import Checkpointer, SaveResult
from truestep.storage.interface import Store

SHAPES = {
    "model.embed": (97, 33),
    "model.norm": (5,),
    "model.wide": (3, 130),
    "optim.wide.exp_avg": (3, 130),
    "model.empty": (0, 4),
}


def full_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Whole tensors of several dtypes, the same on every rank for a seed."""
    made = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    state["model.half"] = torch.randn(11, 6, generator=made).bfloat16()
    state["model.flags"] = torch.rand(13, generator=made) > 0.5
    state["optim.step"] = torch.tensor(float(seed))
    return state


def shard(
    state: Mapping[str, torch.Tensor], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> dict[str, torch.Tensor]:
    """Every tensor of at least one dimension as a DTensor (FSDP2's way with uneven shards); scalars stay plain."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple(f"m{i}" for i in range(len(mesh_shape))))
    return {n: distribute_tensor(t, mesh, placements) if t.dim() else t.clone() for n, t in state.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    """Bitwise, by name."""
    assert got.keys() == want.keys()
    for name in want:
        a, b = whole(got[name]).contiguous(), want[name].contiguous()
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


def save_one(store: Store, step: int, state: Mapping[str, torch.Tensor], extra: dict | None = None) -> SaveResult:
    """One process, a new attempt, one synchronous save."""
    checkpointer = one(store)
    result = checkpointer.save(step, state, extra or {"step": step}, asynchronous=False).result()
    checkpointer.close()
    return result


def one(store: Store, block_bytes: int = 1024, deadline_s: float = 20.0) -> Checkpointer:
    epoch = begin_epoch(store).number
    return Checkpointer(store, attempt=epoch, rank=0, world=1, kv=None, block_bytes=block_bytes, deadline_s=deadline_s)


def many(store: Store, rank: int, world: int, epoch: int = 1, deadline_s: float = 20.0) -> Checkpointer:
    kv = dist.distributed_c10d._get_default_store()
    return Checkpointer(store, attempt=epoch, rank=rank, world=world, kv=kv, block_bytes=1024, deadline_s=deadline_s)


ROWS = (Shard(0),)
