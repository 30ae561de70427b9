"""State in the host's memory: the numbers, the names and the places of state are those of any optimizer."""

import pytest
import torch

from tests import tiny
from tests.dist import run_ranks
from truestep.numerics.roles import Role
from truestep.optim import build as building
from truestep.optim import offload
from truestep.optim.build import build_optimizer
from truestep.optim.offload import Offloaded
from truestep.recipe.machine import Mesh
from truestep.recipe.stage import Optim
from truestep.train import build as train_building
from truestep.train.step import train_step

SHAPES = {"table": (11, 6), "first": (6, 8), "second": (8, 6), "norm": (6,), "third": (4, 6)}
ROLES = {name: Role.NORM if name == "norm" else Role.MATRIX for name in SHAPES} | {"table": Role.EMBEDDING}


def parameters(dtype):
    random = torch.Generator().manual_seed(4)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for name, shape in SHAPES.items()}


def trained(kind, limit, offloaded, dtype=torch.float32, steps=3):
    """Parameters and optimizer after some steps with made-up gradients, in buckets of `limit` elements."""
    params = parameters(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "BUCKET_ELEMENTS", limit)
        optimizer = build_optimizer(params.items(), ROLES, Optim(kind=kind, lr=1e-2), offload=offloaded)
    random = torch.Generator().manual_seed(5)
    for step in range(steps):
        optimizer.set_lr_factor(1 / (step + 1))
        for name, param in params.items():
            if (name, step) != ("second", 1):  # one without a gradient
                param.grad = torch.randn(param.shape, generator=random).to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    return params, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind, limit", [("adamw", 1), ("adamw", 80), ("adamw", 10**9), ("muon", 50)])
def test_same_bits_and_same_names_as_without(kind, limit, dtype):
    plain, one = trained(kind, limit, False, dtype)
    moved, other = trained(kind, limit, True, dtype)
    assert isinstance(other, Offloaded) and len(other.buckets) == {1: 5, 50: 5, 80: 3, 10**9: 2}[limit]
    assert all(torch.equal(plain[name], moved[name]) for name in plain)
    here, there = one.named_state(), other.named_state()
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert torch.equal(value, there[name]) and value.dtype == there[name].dtype, name
    inside = {bucket.host.untyped_storage().data_ptr() for bucket in other.buckets}
    assert {value.untyped_storage().data_ptr() for value in there.values()} == inside


def test_state_goes_from_one_kind_to_the_other():
    params, plain = trained("adamw", 1, False)
    again, moved = trained("adamw", 60, True, steps=0)
    for name, value in moved.named_state().items():
        value.copy_(plain.named_state()[name])
    with torch.no_grad():
        for name, param in again.items():
            param.copy_(params[name])
    for some, optimizer in ((params, plain), (again, moved)):
        for name, param in some.items():
            param.grad = torch.full(SHAPES[name], 0.3)
        optimizer.set_lr_factor(1.0)
        optimizer.step()
    assert all(torch.equal(params[name], again[name]) for name in params)


def _trains(rank, world, mesh, offloaded):
    """Parts of this rank after two steps, and the names and shapes of what a checkpoint would hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_building, "require_gpu", lambda machine, device: None)
        patch.setattr(building, "BUCKET_ELEMENTS", 1000)
        training = tiny.state(tiny.job(rank, world), mesh=mesh, offload_optimizer=offloaded)
    assert isinstance(training.optimizer, Offloaded) == offloaded
    for batch in tiny.rows(2):
        train_step(training, tiny.share(batch, rank // mesh.tp, world // mesh.tp, 6), batch.num_targets, [])
    tensors = training.tensors()
    return {name: (piece.local.clone(), piece.start, piece.owned) for name, piece in tensors.items()}


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(dp_shard=1, tp=2)], ids=["fsdp", "tensor"])
def test_shards_train_alike(mesh):
    for plain, moved in zip(run_ranks(_trains, 2, mesh, False), run_ranks(_trains, 2, mesh, True)):
        assert plain.keys() == moved.keys() and any(name.startswith("optim.") for name in plain)
        for name, (value, *place) in plain.items():
            assert torch.equal(value, moved[name][0]) and place == list(moved[name][1:]), name


def test_views_are_aligned_and_do_not_overlap():
    state = {
        torch.empty(1): {"step": torch.tensor(3.0), "m": torch.arange(100.0)},
        torch.empty(2): {"m": torch.ones(7)},
    }
    space = torch.zeros(4096, dtype=torch.uint8)
    views = [view for kept in offload._views(state, space).values() for view in kept.values()]
    begins = [view.data_ptr() - space.data_ptr() for view in views]
    assert begins == [0, 256, 768] and [view.shape for view in views] == [(), (100,), (7,)]
