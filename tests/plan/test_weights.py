"""Parameters of a rank, against the parameters of the built model cut by its own table."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.models import LLAMA_405B
from truestep.models.decoder import Decoder
from truestep.numerics.axis import Axes, Axis
from truestep.plan.weights import Weights, block_weights, part_weights
from truestep.recipe.degrees import Degrees
from truestep.recipe.model import ModelSection

SMALL: dict[str, Any] = {"hidden_size": 24, "num_layers": 2, "head_dim": 4, "intermediate_size": 10}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_heads": 6, "num_kv_heads": 2, "attention_out_bias": True, "mlp_bias": True},
    "olmo2": {"family": "olmo2", "num_heads": 4, "num_kv_heads": 4},
    "gemma3": {"family": "gemma3", "num_heads": 4, "num_kv_heads": 1, "tie_embeddings": True},
    "mixtral": {"family": "mixtral", "num_heads": 4, "num_kv_heads": 2, "moe": {"num_experts": 4, "top_k": 2}},
    "deepseek_v3": {
        "family": "deepseek_v3",
        "num_heads": 4,
        "moe": {"num_experts": 8, "top_k": 2, "expert_size": 6, "shared_size": 12, "dense_layers": 1},
        "mla": {"q_rank": 7, "kv_rank": 5, "nope_dim": 4, "rope_dim": 2, "v_dim": 6},
    },
}


def _section(name: str) -> ModelSection:
    options = {key: value for key, value in SMALL.items() if not (key == "head_dim" and name == "deepseek_v3")}
    return ModelSection.model_validate(options | MODELS[name]).resolved(37)


def _built(section: ModelSection, tp: int, ep: int) -> Weights:
    """Of the fullest tensor rank: what the table leaves of every parameter."""
    with torch.device("meta"):
        model = Decoder(section)
    axis = Axis("tp")
    axis.size, axis.rank = tp, tp - 1  # without a group: nothing is sent
    model.place(Axes(tp=axis))
    splits, sums = model.splits(), {"matrices": 0, "experts": 0, "small": 0}
    for name, parameter in model.named_parameters():
        split, elements = splits.get(name), parameter.numel()
        if split is not None:
            size = tp if split.axis == "tp" else ep
            n = parameter.shape[split.dim]
            parts = [split.span(n, size, rank) for rank in range(size)]
            elements = elements // n * max(stop - start for start, stop in parts)
        kind = "experts" if split is not None and split.axis == "ep" else "matrices"
        if parameter.ndim < 2 or "router" in name:
            kind = "small"
        sums[kind] += elements
    return Weights(**sums)


@pytest.mark.parametrize("tp, ep", [(1, 1), (2, 1), (2, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_a_rank_are_those_of_the_built_model(name, tp, ep):
    section = _section(name)
    ep = ep if section.moe else 1
    degrees = Degrees(dp_shard=4, tp=tp, ep=ep)
    assert part_weights(section, range(2), degrees, first=True, last=True) == _built(section, tp, ep)


@pytest.mark.parametrize("name", MODELS)
def test_on_one_device_they_are_the_models_counts(name):
    section = _section(name)
    assert part_weights(section, range(2), Degrees(), first=True, last=True).total == section.counts().total


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4))
def test_stages_add_up_to_the_model(tp, ep):
    section = _section("mixtral")
    degrees = Degrees(pp=2, tp=tp, ep=ep)
    parts = [part_weights(section, range(i, i + 1), degrees, first=i == 0, last=i == 1) for i in (0, 1)]
    assert parts[0] + parts[1] == part_weights(section, range(2), degrees, first=True, last=True)


def test_llama_405b():
    """405,853,388,800 parameters, as its configuration on Hugging Face gives; 8 of 16 pipeline ranks hold 1/16."""
    assert LLAMA_405B.counts().total == 405_853_388_800
    degrees = Degrees(pp=16, dp_shard=128, tp=8)
    block = block_weights(LLAMA_405B, 60, degrees)
    assert block.matrices * 8 + block.small == (LLAMA_405B.counts().attention + LLAMA_405B.counts().mlp) // 126 + 32768
    middle = part_weights(LLAMA_405B, range(7, 15), degrees, first=False, last=False)
    assert middle.on_a_rank(degrees) == -(-middle.matrices // 128) + middle.small
    assert 16 * 8 * 128 * middle.on_a_rank(degrees) == pytest.approx(405.85e9, rel=0.03)
