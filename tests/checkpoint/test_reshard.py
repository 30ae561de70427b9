"""A state saved on one mesh loads bitwise on any other, and a reader fetches only what it needs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from tests.checkpoint.common import ROWS, assert_same, full_state, many, one, save_one, shard
from tests.dist import run_ranks
from truestep.checkpoint.catalogue import begin_epoch, newest, read_manifest
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import load, load_newest
from truestep.storage.local import LocalStore

MESHES = {
    "rows": lambda world: ((world,), ROWS),
    "columns": lambda world: ((world,), (Shard(1),)),
    "replicate+rows": lambda world: ((2, world // 2), (Replicate(), Shard(0))),
    "rows+columns": lambda world: ((2, world // 2), (Shard(0), Shard(1))),
}


def _matrices(state, kind):
    """Sharding by columns needs two dimensions."""
    return {n: t for n, t in state.items() if t.dim() == 2 and t.numel()} if "columns" in kind else state


def _save(rank, world, path, kind, asynchronous):
    state = _matrices(full_state(3), kind)
    checkpointer = many(LocalStore(path), rank, world)
    save = checkpointer.save(7, shard(state, *MESHES[kind](world)), {"cursor": 12}, asynchronous)
    result = save.result()
    checkpointer.close()
    return result


def _load(rank, world, path, kind):
    want = _matrices(full_state(3), kind)
    targets = shard(_matrices(full_state(4), kind), *MESHES[kind](world))
    group = Group.of(dist.distributed_c10d._get_default_store(), rank, world, 20.0)
    loaded = load_newest(LocalStore(path), targets, group=group)
    assert loaded is not None and (loaded.step, loaded.extra) == (7, {"cursor": 12})
    assert_same(targets, want)
    return loaded.bytes_read


@pytest.mark.parametrize(("saved", "wanted"), [(1, 4), (4, 2), (3, 1), (2, 3)])
def test_rows_between_world_sizes(tmp_path, saved, wanted):
    begin_epoch(LocalStore(tmp_path))
    for result in run_ranks(_save, saved, tmp_path, "rows", True):
        assert result.ok, result.error
        assert result.num_bytes == sum(t.nbytes for t in full_state(3).values())
    run_ranks(_load, wanted, tmp_path, "rows")


@pytest.mark.parametrize("kind", ["columns", "replicate+rows", "rows+columns"])
def test_meshes_of_two_axes(tmp_path, kind):
    begin_epoch(LocalStore(tmp_path))
    for result in run_ranks(_save, 4, tmp_path, kind, False):
        assert result.ok, result.error
    state = _matrices(full_state(3), kind)
    assert result.num_bytes == sum(t.nbytes for t in state.values()), "each replica's part is stored once"
    run_ranks(_load, 2, tmp_path, kind)
    targets = _matrices(full_state(4), kind)
    load(LocalStore(tmp_path), newest(LocalStore(tmp_path)), targets)
    assert_same(targets, state)


def _big_load(rank, world, path):
    want = _big_state()
    targets = shard({n: torch.zeros_like(t) for n, t in want.items()}, (world,), ROWS)
    store = LocalStore(path)
    loaded = load(store, newest(store), targets)
    assert_same(targets, want)
    return loaded.bytes_read


def _big_state():
    made = torch.Generator().manual_seed(0)
    shapes = {"model.embed": (4000, 96), "model.up": (1023, 384), "model.norm": (384,), "optim.up.exp_avg": (1023, 384)}
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def test_reshard_reads_what_it_needs(tmp_path):
    store = LocalStore(tmp_path)
    checkpointer = one(store, block_bytes=8 << 20)
    assert checkpointer.save(1, _big_state(), {}, asynchronous=False).result().ok
    checkpointer.close()
    size = read_manifest(store, newest(store)).num_bytes
    assert size <= sum(run_ranks(_big_load, 4, tmp_path)) <= 1.1 * size


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 3)


def _fsdp(rank, world, path, seed):
    torch.manual_seed(seed)
    net = _Net()
    mesh = init_device_mesh("cpu", (world,))
    for part in (net.first, net.second, net):
        fully_shard(part, mesh=mesh)
    return net, {f"model.{name}": value for name, value in net.named_parameters()}


def _fsdp_save(rank, world, path):
    _, tensors = _fsdp(rank, world, path, seed=1)
    checkpointer = many(LocalStore(path), rank, world)
    result = checkpointer.save(3, tensors, {}, asynchronous=True).result()
    checkpointer.close()
    return result


def _fsdp_load(rank, world, path):
    net, tensors = _fsdp(rank, world, path, seed=2)
    load(LocalStore(path), newest(LocalStore(path)), tensors)
    torch.manual_seed(1)
    assert_same(tensors, {f"model.{name}": value.detach() for name, value in _Net().named_parameters()})
    out = net.second(net.first(torch.ones(2, 7)))
    out.sum().backward()
    return True


def test_fsdp2_uneven_shards(tmp_path):
    begin_epoch(LocalStore(tmp_path))
    assert all(result.ok for result in run_ranks(_fsdp_save, 4, tmp_path))
    assert run_ranks(_fsdp_load, 3, tmp_path) == [True] * 3


def test_newest_of_two(tmp_path):
    store = LocalStore(tmp_path)
    assert save_one(store, 1, full_state(0)).ok
    assert save_one(store, 2, full_state(1)).ok
    targets = full_state(2)
    assert load_newest(store, targets).step == 2
    assert_same(targets, full_state(1))
