"""The norm is that of all gradients, whatever their dtypes, and clipping never does harm. (Over ranks: C33 in
tests/parallel/test_cases.py.)"""

import math

import pytest
import torch

from truestep.numerics.axis import Axis
from truestep.numerics.pieces import piece_of
from truestep.optim.clip import clip_, clip_coefficient
from truestep.optim.scaler import LossScaler
from truestep.parallel.reduce import global_norm


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def grad_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    return global_norm([piece_of(grad) for grad in grads], Axis("world"), torch.device("cpu"))


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
    ours = [torch.randn_like(p) for p in params]
    for p, grad in zip(params, ours):
        p.grad = grad.clone()
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
    assert weight.grad is not None
    assert grad_norm([weight.grad]).item() == pytest.approx(1.0, abs=1e-15)
