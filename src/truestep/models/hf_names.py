"""Names of parameters: ours and those of Hugging Face, one for one."""

import re

from truestep.recipe.model import ModelSection

_OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
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
}
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
    """The Hugging Face name of our parameter `name`; of a user's own module, the name in that module."""
    if section.module is not None:
        return name.removeprefix("module.")
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    assert match is not None, name
    layer, inner, kind = match.groups()
    inner = (_INNER | _NORMS[section.norm_placement or "pre"])[inner]
    return f"model.layers.{layer}.{inner}.{kind}"


def hf_parts(name: str, section: ModelSection) -> list[tuple[str, int | None]]:
    """The Hugging Face tensors that our parameter or buffer `name` is made of, with the index of each along its first
    dimension; None is all of it. None at all where Hugging Face does not keep it: it starts at 0."""
    return [(hf_name(name, section), None)]
