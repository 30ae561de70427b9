"""Muon: the same whatever the sharding, near to torch's, and no matrix done twice."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.dist import run_ranks
from truestep.numerics.roles import Role
from truestep.optim import muon
from truestep.optim.build import build_optimizer
from truestep.optim.newton_schulz import cost, orthogonalise
from truestep.optim.owners import buckets
from truestep.recipe.stage import Optim

# Uneven over 2, 3 and 4 ranks; the third leaves ranks without rows.
SHAPES = {"a": (7, 4), "b": (4, 7), "c": (2, 6), "d": (5, 5), "e": (9, 3)}
SECTION = Optim(kind="muon", muon_lr=0.05, lr=0.01)


def values(name: str, step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(ord(name) * 100 + step)
    return torch.randn(SHAPES[name], generator=g)


def train(place, steps: int = 3, replicas=None, section: Optim = SECTION) -> dict[str, torch.Tensor]:
    """Parameters and momenta after some steps with given gradients, which `place` lays out."""
    named = [(name, torch.nn.Parameter(place(values(name, 0)))) for name in SHAPES]
    optimizer = build_optimizer(named, dict.fromkeys(SHAPES, Role.MATRIX), section, replicas=replicas)
    for step in range(1, steps + 1):
        for name, param in named:
            param.grad = place(values(name, step))
        optimizer.step()
    found = {name: param.detach() for name, param in named} | optimizer.named_state()
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def _sharded(rank: int, world: int, shape: tuple[int, ...], layout) -> tuple[dict[str, torch.Tensor], int]:
    """The result, and how many matrices this rank orthogonalised."""
    mesh, done = init_device_mesh("cpu", shape), []
    muon.orthogonalise = lambda x, *rest: done.append(x.shape) or orthogonalise(x, *rest)
    return train(lambda x: distribute_tensor(x, mesh, layout)), len(done)


@pytest.mark.parametrize(
    "shape, layout",
    [
        ((2,), [Shard(0)]),
        ((3,), [Shard(0)]),
        ((4,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((3,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Replicate()]),
        ((1, 3), [Replicate(), Shard(0)]),
    ],
    ids=str,
)
def test_sharding_changes_no_bit(shape, layout):
    expected = train(lambda x: x)
    world = torch.Size(shape).numel()
    results = run_ranks(_sharded, world, shape, layout)
    for found, _ in results:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    done = [count for _, count in results]
    assert sum(done) == 3 * len(SHAPES) and max(done) < sum(done)  # each matrix once a step, shared among the ranks


def _replicated(rank: int, world: int) -> dict[str, torch.Tensor]:
    return train(lambda x: x, replicas=torch.distributed.group.WORLD)


def test_plain_replicas_share_the_work_and_agree():
    expected = train(lambda x: x)
    for found in run_ranks(_replicated, 3):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def _low_precision(rank: int, world: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    section = Optim(kind="muon", muon_dtype="bfloat16")
    return train(lambda x: distribute_tensor(x, mesh, [Shard(0)]), section=section)


def test_sharding_changes_no_bit_in_bfloat16_either():
    expected = train(lambda x: x, section=Optim(kind="muon", muon_dtype="bfloat16"))
    for found in run_ranks(_low_precision, 2):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert expected["a"].dtype == torch.float32


def test_near_to_the_muon_of_torch():
    named = [(name, torch.nn.Parameter(values(name, 0))) for name in SHAPES]
    torchs = torch.optim.Muon([p for _, p in named], lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=True)
    for step in range(1, 4):
        for name, param in named:
            param.grad = values(name, step)
        torchs.step()
    ours = train(lambda x: x, section=Optim(kind="muon", muon_lr=0.05, muon_dtype="bfloat16"))
    for name, param in named:
        assert (ours[name] - param).abs().max() < 0.01 * (param - values(name, 0)).abs().max()


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_singular_values_come_near_to_one(shape):
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    x = orthogonalise(u @ torch.diag(torch.linspace(0.1, 3.0, len(v), dtype=torch.float64)) @ v, 5, torch.float64)
    singular = torch.linalg.svdvals(x)
    assert x.shape == shape and singular.min() > 0.6 and singular.max() < 1.3
    turned = u.T @ x @ v.T  # the singular vectors stay
    torch.testing.assert_close(turned, torch.diag(turned.diagonal()), rtol=0, atol=1e-12)


def test_a_zero_matrix_stays_zero():
    assert torch.equal(orthogonalise(torch.zeros(3, 2), 5, torch.float32), torch.zeros(3, 2))


def test_matrices_without_gradient_stay():
    named = [(name, torch.nn.Parameter(values(name, 0))) for name in SHAPES]
    optimizer = build_optimizer(named, dict.fromkeys(SHAPES, Role.MATRIX), SECTION)
    named[0][1].grad = values("a", 1)
    optimizer.step()
    assert not torch.equal(named[0][1], values("a", 0)) and torch.equal(named[1][1], values("b", 0))


def test_work_is_shared_by_cost():
    shapes = [torch.Size((64, 64))] * 3 + [torch.Size((8, 8))] * 40
    (bucket,) = buckets(shapes, 4, cost)
    load = [sum(cost(shapes[i]) for i, owner in bucket if owner == rank) for rank in range(4)]
    assert sorted(i for i, _ in bucket) == list(range(43)) and max(load) == cost(shapes[0])
    several = buckets([torch.Size((8192, 8192))] * 5, 2, cost)
    assert [len(bucket) for bucket in several] == [2, 2, 1]  # memory in flight is bounded
