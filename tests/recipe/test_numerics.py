"""[numerics]: defaults of each kind, idle options, what it asks of the model."""

import pytest
from pydantic import ValidationError

from truestep.recipe.check_numerics import numerics_problems
from truestep.recipe.effect import unused
from truestep.recipe.model import ModelSection
from truestep.recipe.numerics import LowPrecision, Numerics


def low(kind: str, **fields) -> LowPrecision:
    return LowPrecision(kind=kind, **fields)


def test_defaults_are_fast_and_high():
    assert Numerics().reduction == "fast" and Numerics().low_precision is None


@pytest.mark.parametrize(
    "kind, low_gradient, stochastic, high",
    [
        ("fp8-tensorwise", True, False, []),
        ("fp8-rowwise", False, False, []),
        ("mxfp8", True, False, []),
        ("nvfp4", True, True, [17, 18, 19]),
    ],
)
def test_what_each_kind_asks_for(kind, low_gradient, stochastic, high):
    section = low(kind)
    assert section.low_weight_gradient is low_gradient and section.stochastic is stochastic
    assert [layer for layer in range(20) if not section.is_low_layer(layer, 20)] == high


def test_what_is_given_goes_before_the_kind():
    section = low("nvfp4", weight_gradient="high", stochastic_rounding=False, high_first=2, high_last=1)
    assert not section.low_weight_gradient and not section.stochastic
    assert [layer for layer in range(8) if section.is_low_layer(layer, 8)] == [2, 3, 4, 5, 6]
    assert (
        low("fp8-rowwise", weight_gradient="low").low_weight_gradient
        and low("mxfp8", stochastic_rounding=True).stochastic
    )


@pytest.mark.parametrize("layers, high", [(1, 1), (6, 1), (7, 2), (13, 2), (14, 3), (62, 10)])
def test_nvfp4_keeps_the_last_fifteen_percent_rounded_up(layers, high):
    assert sum(not low("nvfp4").is_low_layer(layer, layers) for layer in range(layers)) == high


@pytest.mark.parametrize(
    "section, idle",
    [
        (low("nvfp4"), {"block_scale"}),
        (low("nvfp4", weight_gradient="high"), {"block_scale", "hadamard"}),
        (low("mxfp8"), {"hadamard"}),
        (low("fp8-rowwise"), {"hadamard", "block_scale"}),
        (low("fp8-tensorwise"), {"hadamard", "block_scale"}),
    ],
)
def test_options_without_effect(section, idle):
    assert set(unused(section)) == idle


@pytest.mark.parametrize(
    "fields", [{"kind": "fp4"}, {"kind": "mxfp8", "high_last": -1}, {"kind": "mxfp8", "hadamar": 1}, {}]
)
def test_bad_values(fields):
    with pytest.raises(ValidationError):
        LowPrecision(**fields)


def said(section: LowPrecision, **model) -> list[str]:
    sizes = {"hidden_size": 64, "num_layers": 4} if "module" not in model else {}
    found = numerics_problems(Numerics(low_precision=section), ModelSection(**(sizes | model)))
    return [f"{problem.path} {problem.text}" for problem in found]


def test_what_it_asks_of_the_model():
    assert said(low("nvfp4")) == []
    assert said(low("nvfp4"), num_layers=1) == [
        (
            "numerics.low_precision keeps every block high: 0 first and the last 15 % of model.num_layers = 1; "
            "leave at least one between them."
        )
    ]
    assert "2 first and 2 last of model.num_layers = 4" in said(low("mxfp8", high_first=2, high_last=2))[0]
    assert "a model of your own" in said(low("mxfp8"), module="own.py:Model")[0]
