"""Case C86: the formulas of papers give the numbers that the papers print."""

import pytest

from tests.plan.published import (
    activation_bytes_per_layer,
    first_stage_bytes,
    gpt_parameters,
    training_days,
    zero_bytes,
)

GIB = 2**30
MEGATRON = [
    # billions, heads, hidden, layers (arXiv 2104.04473, table 1; sequences of 2048, vocabulary 51,200)
    (1.7, 2304, 24),
    (3.6, 3072, 30),
    (7.5, 4096, 36),
    (18.4, 6144, 40),
    (39.1, 8192, 48),
    (76.1, 10240, 60),
    (145.6, 12288, 80),
    (310.1, 16384, 96),
    (529.6, 20480, 105),
    (1008.0, 25600, 128),
]
KORTHIKANTI = {
    # hidden, layers, heads, rows, pipeline ranks, stages on each; GiB: tensor parallel alone, with sequence parallelism
    # and selective recomputation, and 18 bytes a parameter (arXiv 2205.05198, figure 1; tensor ranks 8)
    "22B": (6144, 48, 64, 4, 1, 1, 59.25, 9.5625, 45.5625),
    "175B": (12288, 96, 96, 1, 8, 3, 66.84, 12.352, 45.5625),
    "530B": (20480, 105, 128, 1, 35, 3, 114.02, 23.076, 31.640625),
    "1T": (25600, 128, 160, 1, 64, 1, 131.25, 26.5625, 32.958984),
}


def test_c86d_zero_2():
    assert zero_bytes(1e9, ranks=8, stage=2) == pytest.approx(3.75e9)
    assert zero_bytes(7.5e9, ranks=64, stage=0) == pytest.approx(120e9)  # the paper's figure 1
    assert [round(zero_bytes(7.5e9, 64, stage) / 1e9, 1) for stage in (1, 2, 3)] == [31.4, 16.6, 1.9]


@pytest.mark.parametrize("billions, hidden, layers", MEGATRON)
def test_parameters_of_megatrons_ten_models(billions, hidden, layers):
    assert round(gpt_parameters(layers, hidden, 2048, 51200) / 1e9, 1) == billions


def test_days_of_training():
    assert training_days(175e9, 300e9, 1024, 140e12) == pytest.approx(33.9, abs=0.05)
    assert training_days(1e12, 450e9, 3072, 163e12) == pytest.approx(83.2, abs=0.05)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_activations_and_model_states_of_four_models(name):
    h, layers, a, b, p, v, tensor, selective, states = KORTHIKANTI[name]
    alone = activation_bytes_per_layer(2048, b, h, a, 8, sequence_parallel=False, recompute="none")
    least = activation_bytes_per_layer(2048, b, h, a, 8, sequence_parallel=True, recompute="selective")
    assert first_stage_bytes(alone, layers, p, v) / GIB == pytest.approx(tensor, rel=1e-4)
    assert first_stage_bytes(least, layers, p, v) / GIB == pytest.approx(selective, rel=1e-4)
    assert 18 * 12 * layers * h * h / (8 * p) / GIB == pytest.approx(states, rel=1e-6)


def test_full_recomputation_keeps_a_layers_input():
    found = activation_bytes_per_layer(2048, 1, 12288, 96, 8, sequence_parallel=True, recompute="full")
    assert found == 2 * 2048 * 12288
