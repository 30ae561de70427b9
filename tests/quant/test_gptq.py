"""GPTQ: against the closed form of its equation, and never worse than rounding to nearest."""

import pytest
import torch

from truestep.errors import ModelError
from truestep.numerics.quantised.grid import find_scales, to_codes, to_values
from truestep.quant.gptq import gptq, output_error
from truestep.quant.weights import nearest, scheme_of

OUTPUTS, INPUTS = 12, 40


def correlated(rows: int = 800, inputs: int = INPUTS, seed: int = 0) -> torch.Tensor:
    """Inputs of unlike sizes that lean on each other, as those of real layers do."""
    mix = torch.randn(inputs, inputs, generator=torch.Generator().manual_seed(0)) / inputs**0.5 + torch.eye(inputs)
    return (
        torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) @ mix * torch.logspace(-1, 0.5, inputs)
    )


def weight() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(9))


def naive(w: torch.Tensor, seen: torch.Tensor, scheme, damp: float) -> torch.Tensor:
    """Optimal brain quantisation in a fixed order, with the inverse of what is left made anew for every column (arXiv
    2210.17323, equations 1 and 2)."""
    hessian = seen.double() + damp * seen.double().diagonal().mean() * torch.eye(INPUTS, dtype=torch.float64)
    mean = float(seen.diagonal().mean())
    scales = find_scales(w, scheme, torch.float32, (seen.diagonal() / mean).clamp(min=1e-6).float())
    order = torch.argsort(seen.diagonal(), descending=True).tolist() if scheme.act_order else list(range(INPUTS))
    work, out = w.double(), torch.zeros(OUTPUTS, INPUTS)
    for k, column in enumerate(order):
        left = order[k:]
        inverse = torch.linalg.inv(hessian[left][:, left])
        one = slice(column // (scheme.group or INPUTS), column // (scheme.group or INPUTS) + 1)
        own = type(scales)(scales.scale_OG[:, one])
        value = to_values(to_codes(work[:, column : column + 1].float(), own, scheme), own, scheme)[:, 0]
        out[:, column] = value
        error = (work[:, column] - value.double()) / inverse[0, 0]
        work[:, left] -= error[:, None] * inverse[0]
    return out


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [-1, 8])
def test_equals_optimal_brain_quantisation(group, act_order):
    if group == 8 and not act_order:
        pytest.skip("scales of a group come from updated weights there")
    scheme, x, w = scheme_of("int4", group, True, act_order), correlated(), weight()
    seen = x.t() @ x
    found = gptq(w, seen, scheme, torch.float32, 0.01)
    ours = to_values(found.codes, found.scales, scheme)
    assert float((ours == naive(w, seen, scheme, 0.01)).float().mean()) > 0.99  # a tie may fall otherwise


def test_blocks_of_columns_do_not_matter(monkeypatch):
    x, w = correlated(), weight()
    seen = x.t() @ x
    for scheme in (
        scheme_of("int4", 8, False, False),
        scheme_of("int4", 20, True, False),
        scheme_of("int8", 0, True, True),
    ):
        codes = []
        for size in (1, 7, 16, 128):
            monkeypatch.setattr("truestep.quant.gptq._BLOCK", size)
            codes.append(gptq(w, seen, scheme, torch.float32, 0.01).codes)
        assert all(float((one == codes[0]).float().mean()) > 0.99 for one in codes[1:])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [-1, 8])
def test_outputs_are_nearer_than_by_rounding_to_nearest(group, symmetric):
    x, w = correlated(), weight()
    seen, fresh = x.t() @ x, correlated(seed=5)
    for act_order in (False, True):
        scheme = scheme_of("int4", group, symmetric, act_order)
        found, plain = gptq(w, seen, scheme, torch.float32, 0.01), nearest(w, scheme, torch.float32)
        rounded = to_values(plain.codes, plain.scales, scheme)
        # the largest inputs come last here, so that in the files' order nothing is left to make up for their errors
        assert found.error < (0.5 if act_order else 1.0) * output_error(w, rounded, seen)
        values = to_values(found.codes, found.scales, scheme)
        both = fresh.t() @ fresh
        assert output_error(w, values, both) < output_error(w, rounded, both)


def test_inputs_that_were_never_seen_are_rounded_to_nearest():
    x, w = correlated(), weight()
    x[:, 3] = 0
    scheme = scheme_of("int8", 0, True, True)
    found = gptq(w, x.t() @ x, scheme, torch.float32, 0.01)
    values = to_values(found.codes, found.scales, scheme)
    assert bool(((values - w)[:, 3].abs() <= found.scales.scale_OG[:, 0] * 0.51).all())
    nothing = gptq(w, torch.zeros(INPUTS, INPUTS), scheme, torch.float32, 0.01)
    assert bool(((to_values(nothing.codes, nothing.scales, scheme) - w).abs() <= nothing.scales.scale_OG * 0.51).all())


def test_inputs_that_are_not_finite_are_refused():
    with pytest.raises(ModelError, match="not finite"):
        gptq(
            weight(), torch.full((INPUTS, INPUTS), float("nan")), scheme_of("int4", 8, True, True), torch.float32, 0.01
        )
