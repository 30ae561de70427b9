"""What each Hugging Face architecture fixes: the defaults of options that a recipe leaves open, and what it can hold.

To add a family: one entry here, its name in `Family`, and its name mapping in truestep.models.hf. The entries are
checked against the models of `transformers` in tests/recipe/test_families.py."""

from dataclasses import dataclass
from typing import Any, Literal

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3"
]


@dataclass(frozen=True)
class ExpertRules:
    """The same of [model.moe]: options that are just so, and options that the configuration can hold besides. "bias"
    stands for balance = "bias", whose offsets need a place in the files."""

    structure: dict[str, Any]
    extra: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FamilyRules:
    """`structure`: options that every model of the family has just so. `bias`: "none", "qkv" (always), or "flag" (one
    flag for q, k, v and the output projection). `extra`: options that its configuration can hold besides. `activation`
    is a default only. `experts`: its blocks have experts, and need [model.moe]. `latent`: it needs [model.mla]."""

    structure: dict[str, Any]
    bias: Literal["none", "qkv", "flag"]
    extra: frozenset[str] = frozenset()
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: ExpertRules | None = None
    latent: bool = False


def _structure(qk_norm: str = "none", norm_placement: str = "pre", gemma: bool = False) -> dict[str, Any]:
    return {"qk_norm": qk_norm, "norm_placement": norm_placement, "norm_offset": gemma, "embed_scale": gemma}


_WINDOW = frozenset({"sliding_window", "full_attention_every"})
_GEMMA = _WINDOW | {"query_scale", "logit_softcap"}
_DEEPSEEK = frozenset({"shared_size", "dense_layers", "groups", "top_groups", "scale", "bias"})

FAMILIES: dict[Family, FamilyRules] = {
    "llama": FamilyRules(_structure(), "flag", frozenset({"mlp_bias"})),
    "mistral": FamilyRules(_structure(), "none", frozenset({"sliding_window"})),
    "qwen2": FamilyRules(_structure(), "qkv", _WINDOW),
    "qwen3": FamilyRules(_structure("head"), "flag", _WINDOW),
    "olmo2": FamilyRules(_structure("full", "post"), "flag"),
    "gemma2": FamilyRules(_structure("none", "sandwich", True), "flag", _GEMMA | {"attention_softcap"}, "gelu_tanh"),
    "gemma3": FamilyRules(_structure("head", "sandwich", True), "flag", _GEMMA | {"rope_local_theta"}, "gelu_tanh"),
    "mixtral": FamilyRules(
        _structure(),
        "none",
        frozenset({"sliding_window"}),
        experts=ExpertRules({"scoring": "softmax", "normalise": True}),
    ),
    "qwen3_moe": FamilyRules(
        _structure("head"),
        "flag",
        frozenset({"sliding_window"}),
        experts=ExpertRules({"scoring": "softmax"}, frozenset({"dense_layers", "every"})),
    ),
    "deepseek_v3": FamilyRules(
        _structure(), "flag", experts=ExpertRules({"scoring": "sigmoid"}, _DEEPSEEK), latent=True
    ),
}
