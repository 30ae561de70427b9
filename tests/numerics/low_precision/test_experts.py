"""Experts in low precision: right numbers, and a row's do not depend on the rows that lie beside it."""

import pytest
import torch

from truestep.errors import UserError
from truestep.numerics.low_precision.experts import LowPrecisionExperts, has_kernel
from truestep.recipe.numerics import LowPrecision

KINDS = ["fp8-tensorwise", "fp8-rowwise", "mxfp8", "nvfp4"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    rows, weight, g = (
        torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((20, 64), (3, 96, 64), (20, 96))
    )
    return (
        rows * torch.logspace(-3, 3, 20, dtype=dtype)[:, None],
        weight * torch.tensor([1.0, 30, 0.1])[:, None, None],
        g,
    )


def run(kind: str, rows, weight, g, ends):
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    y = LowPrecisionExperts(LowPrecision(kind=kind))(rows, weight, torch.tensor(ends, dtype=torch.int32))
    y.backward(g)
    return y.detach(), rows.grad, weight.grad


@every_kind
@pytest.mark.parametrize("ends", [[5, 5, 20], [0, 12, 20], [20, 20, 20]])
def test_near_the_plain_products_of_every_row(kind, ends):
    rows, weight, g = data()
    y, d_rows, d_weight = run(kind, rows, weight, g, ends)
    bound = 0.25 if kind == "nvfp4" else 0.06
    starts = [0, *ends[:-1]]
    for expert, (start, end) in enumerate(zip(starts, ends)):
        own = slice(start, end)
        for row in range(start, end):
            for got, want in ((y[row], weight[expert] @ rows[row]), (d_rows[row], g[row] @ weight[expert])):
                assert (got - want).norm() / want.norm() < bound
        want = g[own].t() @ rows[own]
        assert (d_weight[expert] - want).norm() <= bound * want.norm()


@every_kind
def test_rows_come_out_the_same_in_any_company(kind):
    """As on another mesh: in another order, with other rows, without some experts."""
    rows, weight, g = data()
    y, d_rows, d_weight = run(kind, rows, weight, g, [5, 11, 20])
    few = [14, 11, 19]
    y_few, d_few, _ = run(kind, rows[few], weight[2:], g[few], [3])
    assert torch.allclose(y[few], y_few, rtol=1e-12) and torch.allclose(d_rows[few], d_few, rtol=1e-12)
    halves = [run(kind, rows[a:b], weight[2:], g[a:b], [b - a])[2][0] for a, b in ((11, 14), (14, 20))]
    assert torch.allclose(sum(halves), d_weight[2], rtol=1e-10, atol=1e-12)


@every_kind
def test_activations_are_kept_in_the_low_format(kind):
    rows = torch.randn(32, 64, dtype=torch.bfloat16).requires_grad_() * 1
    weight = torch.randn(2, 32, 64, dtype=torch.bfloat16).requires_grad_()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
        y = LowPrecisionExperts(LowPrecision(kind=kind))(rows, weight, torch.tensor([9, 32], dtype=torch.int32))
    assert y.dtype is torch.bfloat16
    assert sum(sizes) - weight.nbytes < rows.nbytes * (0.4 if kind == "nvfp4" else 0.6)


def test_autocast_equals_parameters_of_the_dtype():
    rows, weight, _ = data(torch.float32)
    ends = torch.tensor([5, 11, 20], dtype=torch.int32)
    product = LowPrecisionExperts(LowPrecision(kind="mxfp8"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = product(rows.bfloat16(), weight, ends)
    assert torch.equal(y, product(rows.bfloat16(), weight.bfloat16(), ends)) and y.dtype is torch.bfloat16


def test_sizes_that_blocks_do_not_fit_are_refused():
    experts = LowPrecisionExperts(LowPrecision(kind="mxfp8"))
    experts.check("blocks.1.mlp.experts.up", (96, 64))
    with pytest.raises(UserError, match="have 40 outputs; the nearest number that fits is 32"):
        experts.check("blocks.1.mlp.experts.up", (40, 64))


def test_rows_that_are_no_whole_words_take_the_loop():
    cuda = torch.device("cuda")
    assert has_kernel(cuda, torch.bfloat16, 64, 96)
    assert not has_kernel(cuda, torch.bfloat16, 64, 100) and not has_kernel(cuda, torch.bfloat16, 36, 96)
    assert not has_kernel(cuda, torch.float32, 64) and not has_kernel(torch.device("cpu"), torch.bfloat16, 64)
