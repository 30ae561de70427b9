"""Memory of ranks, recomputation by a budget, and traffic, for shapes whose numbers are known."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.models import LLAMA_405B
from tests.recipe.small import small
from truestep.plan.activations import Kept
from truestep.plan.memory import fewest, rank_memory, recomputation
from truestep.plan.setup import Setup
from truestep.plan.traffic import Traffic, traffic
from truestep.recipe.degrees import Degrees
from truestep.recipe.load import load
from truestep.recipe.machine import Machine
from truestep.recipe.model import ModelSection

GIB = 2**30


def setup(model: ModelSection, degrees: Degrees, rows: int, context: int = 128, **machine: Any) -> Setup:
    stage = load(small()).stages[0].model_copy(update={"context": context})
    options = {"microbatch_rows": 1, "precision": "bfloat16"} | machine
    return Setup(model, degrees, Machine.model_validate(options), stage, rows)


LLAMA_3 = setup(LLAMA_405B, Degrees(pp=16, dp_shard=128, tp=8), 2048, 8192)
"""Llama 3's second row: 16,384 GPUs, 16 rows of 8,192 tokens for each of 128 data ranks (arXiv 2407.21783, table 4)."""


def test_llama_405b_on_16384_ranks():
    """16 bytes a parameter of model states over all ranks, if all had as many blocks: 0.369 GiB. The dearest rank has
    8/126 of the blocks, of which tensor ranks hold an eighth and data ranks 1/128."""
    assert LLAMA_3.microbatches == 16 and LLAMA_3.filled == 1
    memory = rank_memory(LLAMA_3, 5)
    states = memory.parameters + memory.gradients + memory.optimizer
    assert states / GIB == pytest.approx(16 * 405.853e9 / 16384 / GIB, rel=0.02)
    block = (405_853_388_800 - 2 * 2_101_346_304) / 126
    assert states == pytest.approx(16 * (8 * block / (8 * 128) + 8 * 2 * 16384), rel=1e-3)  # norms are not sharded
    assert memory.gathered == pytest.approx(6 * 8 * block / 8, rel=1e-4)


def test_flops_of_llama_405b():
    """3.8e25 FLOPs in 15.6 T tokens by the paper, as 6 N D; ours counts products, the look-up for nothing, and causal
    attention besides."""
    flops = LLAMA_405B.train_flops(15_600_000_000_000, 8192)
    assert 6 * LLAMA_405B.counts().total * 15.6e12 == pytest.approx(3.8e25, rel=0.001)
    products = 6 * (LLAMA_405B.counts().total - LLAMA_405B.counts().embedding) * 15.6e12
    attention = 3 * 4 * 126 * 16384 * 8193 / 2 * 15.6e12
    assert flops == pytest.approx(products + attention, rel=1e-4)


def test_the_first_rank_of_1f1b_holds_most_microbatches():
    held = [rank_memory(LLAMA_3, rank).activations for rank in range(1, 15)]
    assert held == sorted(held, reverse=True) and held[0] / held[-1] == pytest.approx(15 / 2, rel=0.01)


def test_a_single_device_holds_everything_once():
    model = ModelSection(hidden_size=64, num_layers=2).resolved(257)
    count = model.counts().total
    memory = rank_memory(setup(model, Degrees(), 8, precision="float32"), 0)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * count, 4 * count, 8 * count)
    assert memory.gathered == 0
    assert rank_memory(setup(model, Degrees(), 8, offload_optimizer=True), 0).optimizer == 0
    wide = rank_memory(setup(model, Degrees(), 8, precision="float64"), 0)
    assert wide.parameters == 8 * count and wide.activations == pytest.approx(2 * memory.activations, rel=0.01)


def test_muon_keeps_one_number_of_each_matrix_of_a_block():
    model = ModelSection(hidden_size=64, num_layers=2).resolved(257)
    plain = setup(model, Degrees(), 8)
    optim = plain.stage.optim.model_copy(update={"kind": "muon"})
    muon = Setup(model, plain.degrees, plain.machine, plain.stage.model_copy(update={"optim": optim}), 8)
    counts = model.counts()
    saved = rank_memory(plain, 0).optimizer - rank_memory(muon, 0).optimizer
    assert saved == 4 * (counts.attention + counts.mlp)


@pytest.mark.parametrize(
    "budget, expected", [(60, [0, 0, 0, 0]), (40, [1, 1, 1, 0]), (30, [1, 1, 1, 1]), (5, [2, 2, 2, 2])]
)
def test_a_budget_of_activations(budget, expected):
    """Blocks keep 10, 5 or 1; what is made again takes 2."""
    assert fewest([[Kept(10, 0), Kept(5, 2), Kept(1, 2)]] * 4, 1.4, budget) == expected


@settings(deadline=None)
@given(st.integers(1, 2**26))
def test_more_memory_never_recomputes_more(budget):
    rank = {"none": 0, "selective": 1, "full": 2}
    model = ModelSection(num_layers=8).resolved(257)

    def planned(memory: int) -> tuple[int, int]:
        auto = {"activation_checkpointing": "auto", "activation_memory": memory}
        asked = setup(model, Degrees(pp=2, dp_shard=2), 16, **auto)
        return sum(rank[mode] for mode in recomputation(asked, 0).values()), rank_memory(asked, 0).activations

    level, size = planned(budget)
    assert level >= planned(2 * budget)[0]
    assert size <= budget or level == 2 * 4


def test_traffic_of_llama_405b():
    """Megatron's count: four gathers or scatters of sbh a layer in each direction; pipeline messages are a tensor
    rank's part of sbh; weights are gathered once a step in 2 bytes and reduced once in 4."""
    sent = {(item.axis, item.what): item for item in traffic(LLAMA_3, 5)}
    tensor = sent["tp", "hidden states"]
    assert tensor == Traffic("tp", "hidden states", 16 * 8 * 8, 16 * 8 * 8 * 8192 * 16384 * 2 * 7 // 8)
    messages = sent["pp", "hidden states and their gradients"]
    assert (messages.count, messages.bytes) == (32, 32 * 8192 * 16384 * 2 // 8)
    gathered, reduced = sent["dp_shard · cp", "weights gathered"], sent["dp_shard · cp", "gradients reduced"]
    assert reduced.bytes == 2 * gathered.bytes and gathered.count == reduced.count == 9
    assert gathered.bytes == pytest.approx(2 * 8 * 3.187e9 / 8 * 127 / 128, rel=1e-3)


def test_axes_of_one_rank_send_nothing():
    model = ModelSection(hidden_size=64, num_layers=2).resolved(257)
    assert traffic(setup(model, Degrees(), 8), 0) == []
    (summed,) = traffic(setup(model, Degrees(dp_replicate=4), 8), 0)
    assert summed.axis == "dp_replicate" and summed.bytes == 2 * 4 * model.counts().total * 3 // 4


def test_experts_and_context():
    moe = {"num_experts": 8, "top_k": 2}
    model = ModelSection.model_validate({"family": "mixtral", "hidden_size": 64, "num_layers": 2, "moe": moe})
    made = setup(model.resolved(257), Degrees(dp_shard=2, cp=2, ep=4), 8)
    sent = {item.axis: item for item in traffic(made, 0)}
    assert sent["ep"].count == 4 * 2 * 2 * 2  # microbatches, blocks, there and back, forward and backward
    assert sent["ep"].bytes == sent["ep"].count * (128 // 2 * 2) * 64 * 2 * 3 // 4
    assert sent["cp"].bytes == 4 * 2 * 2 * 128 * 2 * 64 * 2 // 2
    assert "edp" not in sent and "dp_shard · cp" in sent
