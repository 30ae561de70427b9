"""Tiny models of `transformers` and our section for each, for counts and family defaults."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from truestep.recipe.families import FAMILIES
from truestep.recipe.model import ModelSection

__all__ = ["FAMILIES", "NAMES", "section_of", "tiny_hf"]

NAMES = {
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
    "mlp": ("mlp.",),
    "norm": ("norm",),
    "attention": ("self_attn.",),
}
_SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}


def tiny_hf(family: str, **options: Any) -> PreTrainedModel:
    """A random model of the family with the defaults of its configuration class but for sizes."""
    name = {"gemma3": "Gemma3"}.get(family, family.capitalize())
    config_class = transformers.Gemma3TextConfig if family == "gemma3" else getattr(transformers, f"{name}Config")
    config = config_class(
        **_SIZES,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        **({"tie_word_embeddings": False} | options),
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def section_of(family: str, **options: Any) -> ModelSection:
    """Our section of the same sizes, all else left to the family."""
    sizes = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
    section = ModelSection.model_validate({"family": family, **sizes, "num_layers": 3, "num_kv_heads": 2, **options})
    return section.resolved(_SIZES["vocab_size"])
