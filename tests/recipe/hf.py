"""Tiny models of `transformers` and our section for each, for counts and family defaults."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from truestep.recipe.families import FAMILIES
from truestep.recipe.model import ModelSection

__all__ = ["FAMILIES", "NAMES", "OURS", "section_of", "tiny_hf"]

NAMES = {
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
    "router": ("mlp.gate.",),
    "experts": ("mlp.experts.",),
    "mlp": ("mlp.",),
    "norm": ("norm",),
    "attention": ("self_attn.",),
}
"""Kinds of parameters, each with words in their names; the first that fits counts."""

_CLASSES = {"gemma3": "Gemma3", "qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3"}
_MLA = {"q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 10}
_EXPERTS: dict[str, dict[str, Any]] = {  # of transformers
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
    | {"mlp_only_layers": [0]},
    "deepseek_v3": {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
    | {"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "num_key_value_heads": 4, "q_lora_rank": 12}
    | {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "head_dim": 4},
}
OURS: dict[str, dict[str, Any]] = {
    "mixtral": {"moe": {"num_experts": 6, "top_k": 2}},
    "qwen3_moe": {"moe": {"num_experts": 6, "top_k": 3, "expert_size": 20, "dense_layers": 1}},
    "deepseek_v3": {
        "moe": {"num_experts": 6, "top_k": 3, "expert_size": 20, "dense_layers": 1, "shared_size": 40, "scale": 2.5}
        | {"groups": 3, "top_groups": 2},
        "mla": _MLA,
    },
}
"""The sections below [model] that a family needs."""

_SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}


def tiny_hf(family: str, **options: Any) -> PreTrainedModel:
    """A random model of the family with the defaults of its configuration class but for sizes."""
    name = _CLASSES.get(family, family.capitalize())
    config_class = transformers.Gemma3TextConfig if family == "gemma3" else getattr(transformers, f"{name}Config")
    given: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    given |= {"pad_token_id": None, "tie_word_embeddings": False}
    config = config_class(**(given | _SIZES | _EXPERTS.get(family, {}) | options))
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def section_of(family: str, **options: Any) -> ModelSection:
    """Our section of the same sizes, all else left to the family."""
    sizes = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
    given = {"num_layers": 3, "num_kv_heads": 2} | OURS.get(family, {}) | options
    section = ModelSection.model_validate({"family": family, **sizes, **given})
    return section.resolved(_SIZES["vocab_size"])
