"""The first gate fails closed."""

import math

import pytest

from truestep.gate.heldout import decide
from truestep.recipe.stage import Gate

BOUND = Gate(kind="heldout", max_loss=2.0)


@pytest.mark.parametrize("loss,outcome", [(1.9, "pass"), (2.0, "pass"), (2.1, "fail")])
def test_a_stated_bound(loss, outcome):
    assert decide(BOUND, {"loss": loss}, None).outcome == outcome


@pytest.mark.parametrize(
    "figures", [{}, {"loss": None}, {"loss": math.nan}, {"loss": math.inf}, {"bits_per_byte": 1.0}]
)
def test_c79_missing_or_nan_never_passes(figures):
    verdict = decide(BOUND, figures, None)
    assert verdict.outcome == "fail" and not verdict.promotes and verdict.reasons


def test_not_worse_than_the_parent():
    gate = Gate(kind="heldout", margin=0.1)
    assert decide(gate, {"loss": 2.09}, {"loss": 2.0}).outcome == "pass"
    assert decide(gate, {"loss": 2.11}, {"loss": 2.0}).outcome == "fail"
    assert decide(gate, {"loss": 1.0}, {"loss": math.nan}).outcome == "fail"
    assert decide(gate, {"loss": 1.0}, {}).outcome == "fail"


def test_every_condition_must_hold():
    gate = Gate(kind="heldout", max_loss=3.0, max_bits_per_byte=1.0)
    assert decide(gate, {"loss": 2.0, "bits_per_byte": 0.9}, None).outcome == "pass"
    assert decide(gate, {"loss": 2.0, "bits_per_byte": 1.1}, None).outcome == "fail"
    assert decide(gate, {"loss": 2.0, "bits_per_byte": 0.9}, {"loss": 1.9}).outcome == "fail"


def test_nothing_to_compare_with_is_no_proof():
    assert decide(Gate(kind="heldout"), {"loss": 0.1}, None).outcome == "fail"


def test_no_gate_is_ungated_and_says_why():
    verdict = decide(Gate(kind="none", reason="a trial"), {}, None)
    assert verdict.outcome == "ungated" and verdict.reasons == ["a trial"] and verdict.promotes
