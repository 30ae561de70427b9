"""Activations of a block, against the storages that autograd saves in the real one."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.plan.models import LLAMA_405B
from tests.plan.published import activation_bytes_per_layer
from truestep.models.decoder import Decoder
from truestep.plan.activations import Recompute, block_activations
from truestep.recipe.degrees import Degrees
from truestep.recipe.model import ModelSection

ROWS, T = 3, 64
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
SIZES = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 160}


def _saved(section: ModelSection, low: bool) -> int:
    """Bytes of storages that the forward pass saves, weights and their casts left out."""
    model = Decoder(section)
    shapes = [tuple(p.shape) for p in model.parameters() if p.ndim >= 2]
    weights = {*shapes, *((*outer, b, a) for *outer, a, b in shapes)}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[torch.Tensor] = []
    storages: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        cast = low and tuple(x.shape) in weights
        if storage.data_ptr() not in own and not cast:
            storages[storage.data_ptr()] = storage.nbytes()
        kept.append(x)  # so that no address is used twice
        return x

    tokens = torch.zeros(ROWS, T, dtype=torch.long)
    context = torch.autocast("cpu", dtype=torch.bfloat16) if low else nullcontext()
    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(tokens, head=lambda out: out.hidden_BTD)
    return sum(storages.values())


DENSE = {
    "llama": {},
    "gemma2": {"family": "gemma2", "num_heads": 2, "num_kv_heads": 2, "head_dim": 16},
    "qwen3": {"family": "qwen3", "head_dim": 32},
}
MLA = {"q_rank": 24, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 12}
EXPERTS = {
    "mixtral": {"family": "mixtral", "moe": {"num_experts": 8, "top_k": 2}},
    "deepseek_v3": {
        "family": "deepseek_v3",
        "num_kv_heads": 0,
        "mla": MLA,
        "moe": {"num_experts": 8, "top_k": 2, "expert_size": 48, "shared_size": 96},
    },
}


def _found_and_counted(options: dict[str, Any], low: bool) -> tuple[int, int]:
    """Bytes of one block: in the real one, without what only the CPU's norms keep (the normalised values, which fused
    kernels make again, and the scale of a norm with an offset), and by the formula."""
    section = ModelSection.model_validate(SIZES | options | {"num_layers": 1}).resolved(50)
    found = _saved(section.model_copy(update={"num_layers": 2}), low) - _saved(section, low)
    norms = 4 if section.norm_placement == "sandwich" else 2
    normalised = norms * section.hidden_size
    if section.qk_norm == "head":
        normalised += (section.num_heads + section.num_kv_heads) * section.head_dim
    if section.mla is not None:
        normalised += section.mla.q_rank + section.mla.kv_rank
    scales = norms * section.hidden_size if section.norm_offset else 0
    counted = block_activations(section, 0, Degrees(), ROWS * T, 2 if low else 4, "none").held
    return found - 4 * (normalised * ROWS * T + scales), counted


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_a_blocks_activations_are_what_autograd_saves(name, low):
    found, counted = _found_and_counted(DENSE[name], low)
    assert found == counted


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", EXPERTS)
def test_with_experts_they_are_within_a_twentieth(name, low):
    """What is left out are the choices and their order, and shards of rows beside each other."""
    found, counted = _found_and_counted(EXPERTS[name], low)
    assert counted == pytest.approx(found, rel=0.05)


def test_recomputation_keeps_less():
    degrees, tokens = Degrees(pp=16, dp_shard=128, tp=8), 8192
    none, selective, full = (block_activations(LLAMA_405B, 5, degrees, tokens, 2, mode) for mode in MODES)
    assert none.held > selective.held > full.held == 2 * tokens * 16384 // 8
    assert full.remade == none.held and none.remade == 0


def test_llama_405b_beside_the_published_formula():
    """34 sbh/t (arXiv 2205.05198) is for a GPT with dropout and a plain MLP of 4h, and gathers inputs again in the
    backward pass. SwiGLU of 3.25h keeps 26 h in place of 16 h, and gathered inputs stay: 4 h that t does not share."""
    s, h, t = 8192, 16384, 8
    gpt = activation_bytes_per_layer(s, 1, h, 128, t, sequence_parallel=True, recompute="selective")
    ours = block_activations(LLAMA_405B, 5, Degrees(pp=16, dp_shard=128, tp=t), s, 2, "none").held
    norms, gathered = 2 * 4 * h / t, 2 * 2 * h
    inner, attention = 2 * 4 * 53248 / t, 2 * 2 * (h + 8 * 128) / t
    assert ours == pytest.approx(s * (norms + gathered + inner + attention), rel=1e-3)
    assert gpt == s * h / t * 34 and 2 < ours / gpt < 3
