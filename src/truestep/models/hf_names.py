"""Names of parameters: ours and those of Hugging Face. They go one for one, but for experts: ours are one tensor for
all experts of a block, theirs one for each."""

import re

from truestep.recipe.model import ModelSection

_OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "score.weight": "score.weight",
}
_INNER = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
_EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "sandwich": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


def hf_name(name: str, section: ModelSection) -> str:
    """The Hugging Face name of our parameter `name`, which is one tensor there; of a user's own module, the name in
    that module."""
    if section.module is not None:
        return name.removeprefix("module.")
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    assert match is not None, name
    layer, inner, kind = match.groups()
    if (inner, kind) == ("mlp.router", "bias"):
        return f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    inner = (_INNER | _NORMS[section.norm_placement or "pre"])[inner]
    return f"model.layers.{layer}.{_moe(section, inner)}.{kind}"


def hf_parts(name: str, section: ModelSection) -> list[tuple[str, int | None]]:
    """The Hugging Face tensors that our parameter or buffer `name` is made of, with the index of each along its first
    dimension; None is all of it. None at all where Hugging Face does not keep it: it starts at 0."""
    if section.module is None and name.endswith(".mlp.router.load"):
        return []
    match = re.fullmatch(r"blocks\.(\d+)\.mlp\.experts\.(\w+)", name)
    if match is None or section.module is not None:
        return [(hf_name(name, section), None)]
    assert section.moe is not None, name
    layer, kind = match.groups()
    prefix = f"model.layers.{layer}.{_moe(section, 'mlp.experts')}"
    theirs = (_MIXTRAL if section.family == "mixtral" else _EXPERTS)[kind]
    return [(f"{prefix}.{expert}.{theirs}.weight", expert) for expert in range(section.moe.num_experts)]


def _moe(section: ModelSection, inner: str) -> str:
    """Mixtral has another name for a block's MLP on disk."""
    is_moe = section.family == "mixtral" and inner.startswith(("mlp.gate", "mlp.experts"))
    return inner.replace("mlp.", "block_sparse_moe.") if is_moe else inner
