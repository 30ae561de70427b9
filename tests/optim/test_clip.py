"""The global norm counts each element once whatever the layout, and clipping never does harm."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.dist import run_ranks
from truestep.optim.clip import clip_, clip_coefficient, grad_norm
from truestep.optim.scaler import LossScaler


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_norm_is_that_of_all_elements():
    grads = [
        torch.randn(3, 5),
        torch.randn(7),
        torch.zeros(0, 4),
        torch.randn(2, 2).bfloat16(),
        torch.randn(4).double(),
    ]
    expected = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    norm = grad_norm(grads)
    assert norm.dtype == torch.float64 and norm.item() == pytest.approx(expected, rel=1e-6)
    assert grad_norm([]).item() == 0.0


def test_low_precision_gradients_are_summed_in_fp32():
    assert grad_norm([torch.full((10_000,), 300.0, dtype=torch.float16)]).item() == pytest.approx(30_000, rel=1e-6)
    assert grad_norm([torch.full((10_000,), 1.0, dtype=torch.bfloat16)]).item() == pytest.approx(100, rel=1e-6)


def test_equal_to_the_clipping_of_torch():
    params = [torch.nn.Parameter(torch.randn(3, 5)), torch.nn.Parameter(torch.randn(7))]
    for p in params:
        p.grad = torch.randn_like(p)
    ours = [p.grad.clone() for p in params]
    clip_(ours, grad_norm(ours), 0.5)
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    torch.testing.assert_close(ours, [p.grad for p in params], rtol=1e-5, atol=0)


def test_c20_scaled_gradients_are_unscaled_before_they_are_measured():
    scaler = LossScaler(scale=65_536.0)
    grads = [vector(0.3, 0.4) * 65_536.0]
    scaler.unscale_(grads)
    norm = grad_norm(grads)
    assert clip_(grads, norm, 1.0).item() == 1.0
    assert torch.equal(grads[0], vector(0.3, 0.4))


@pytest.mark.parametrize("mark", [-1.0, math.nan, math.inf, -math.inf])
def test_c20_marks_never_enter_the_formula(mark):
    grads = [vector(2.0)]
    assert clip_(grads, vector(mark)[0], 1.0).item() == 1.0
    assert grads[0].item() == 2.0


def test_c20_zero_gradients_stay_zero():
    grads = [vector(0.0, 0.0)]
    assert clip_(grads, grad_norm(grads), 1.0).item() == 1.0
    assert torch.equal(grads[0], vector(0.0, 0.0))


@pytest.mark.parametrize("norm", [0.0, 1e-300, 0.5, 1.0, 1.0000001, 7.0, 1e300])
def test_c20_the_coefficient_is_in_zero_to_one(norm):
    coefficient = clip_coefficient(vector(norm)[0], 1.0).item()
    assert 0.0 < coefficient <= 1.0 and coefficient * norm <= 1.0 + 1e-15
    assert clip_coefficient(vector(norm)[0], 0.0).item() == 1.0  # switched off


def test_c15_the_norm_before_clipping_is_that_of_the_mean():
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    (weight * torch.ones(12, dtype=torch.float64)).sum().div(12).backward()
    assert grad_norm([weight.grad]).item() == pytest.approx(1.0, abs=1e-15)


def _shards(rank: int, world: int) -> tuple[float, ...]:
    mesh = init_device_mesh("cpu", (2,))
    grads = [DTensor.from_local([vector(3.0), vector(4.0)][rank], mesh, [Shard(0)])]
    norm = grad_norm(grads)
    coefficient = clip_(grads, norm, 2.5)
    return norm.item(), coefficient.item(), grads[0].to_local().item()


def test_c33_shards_add_up():
    assert run_ranks(_shards, 2) == [(5.0, 0.5, 1.5), (5.0, 0.5, 2.0)]


def _experts(rank: int, world: int) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    return grad_norm([DTensor.from_local([vector(4.0, 2.0), vector(6.0, 8.0)][rank], mesh, [Shard(0)])]).item()


def test_c33_experts_are_counted_once_each():
    assert run_ranks(_experts, 2) == pytest.approx([math.sqrt(120)] * 2, abs=1e-12)


def _replicas(rank: int, world: int) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return grad_norm([DTensor.from_local(vector(3.0), mesh, [Replicate()])]).item()


def test_c33_replicas_are_counted_once():
    assert run_ranks(_replicas, 2) == [3.0, 3.0]


def _mixed(rank: int, world: int) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(1.0, 16.0, dtype=torch.float64).view(5, 3)
    layouts = [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(0), Shard(0))]
    grads: list[torch.Tensor] = [distribute_tensor(whole, mesh, layout) for layout in layouts]
    grads.append(DTensor.from_local(whole / 2, mesh, [Partial(), Replicate()]))
    grads.append(DTensor.from_local(whole.chunk(2)[mesh.get_local_rank("b")] / 2, mesh, [Partial(), Shard(0)]))
    return grad_norm([*grads, whole]).item()


def test_c33_any_mix_of_layouts_counts_each_element_once():
    square = sum(i * i for i in range(1, 16))
    assert run_ranks(_mixed, 4) == pytest.approx([math.sqrt(7 * square)] * 4, abs=1e-12)
