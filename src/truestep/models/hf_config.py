"""`config.json` of Hugging Face and our model section, both ways. An option that we would not obey is refused."""

from typing import Any

from truestep.errors import ModelError
from truestep.models.hf_experts import mla_config, mla_from_config, moe_config, moe_from_config
from truestep.models.hf_reader import Reader
from truestep.recipe.families import FAMILIES, Family
from truestep.recipe.model import ModelSection, RopeScaling

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Olmo2ForCausalLM": "olmo2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
SCORERS: dict[str, Family] = {
    name.replace(
        "ForCausalLM", "TextForSequenceClassification" if family == "gemma3" else "ForSequenceClassification"
    ): family
    for name, family in ARCHITECTURES.items()
}
"""Reward models: sequence classification with one label."""
OWN_MODULE = "truestep_module"
"""The model_type of a user's own module, whose directory `transformers` cannot read."""

_TYPES = {"gemma3": "gemma3_text"}
_GEMMA = ("gemma2", "gemma3")
_UNWINDOWED = ("llama", "olmo2", "deepseek_v3")
_SAME = {  # section field: configuration key
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DEFAULTS: dict[Family, dict[str, Any]] = {  # what an absent key means, where that differs from ours
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6}
    | {"sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096, "head_dim": 128},
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    "gemma2": {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "sliding_window": 4096, "head_dim": 256}
    | {"query_pre_attn_scalar": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
    | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "num_key_value_heads": 4},
    "gemma3": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096, "head_dim": 256}
    | {"query_pre_attn_scalar": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
    | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "num_key_value_heads": 4},
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    | {"rope_theta": 1_000_000.0, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
    | {"sliding_window": 4096, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "deepseek_v3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "kv_lora_rank": 512, "q_lora_rank": 1536}
    | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8, "topk_group": 4}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "norm_topk_prob": True}
    | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
}
_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim"},
}


def section_from_config(config: dict[str, Any], where: str = "config.json") -> ModelSection:
    """The resolved section of a Hugging Face configuration (of transformers 4 or 5)."""
    if config.get("model_type") == OWN_MODULE:
        return ModelSection(**config["truestep"])
    family = _family(config, where)
    read = Reader(config, _DEFAULTS[family], where)
    values: dict[str, Any] = {"family": family}
    values |= {ours: read.need(theirs) for ours, theirs in _SAME.items()}
    heads = values["num_heads"]
    values["num_kv_heads"] = read.get("num_key_value_heads") or heads
    if FAMILIES[family].latent:
        values["mla"] = mla_from_config(read, heads)
    else:
        values["head_dim"] = read.get("head_dim") or values["hidden_size"] // heads
    if FAMILIES[family].experts is not None:
        values["moe"] = moe_from_config(read, family, values["num_layers"], values["intermediate_size"])
    values["tie_embeddings"] = bool(read.get("tie_word_embeddings"))
    if _scores(config):
        values |= {"scores": True, "tie_embeddings": False}
        labels = read.get("num_labels") or len(read.get("id2label") or (None, None))
        if labels != 1:
            read.refuse("id2label", read.get("id2label"), "a classifier must have one label, the score")
    values["init_std"] = read.get("initializer_range") or 0.02
    values["activation"] = _activation(read, family)
    bias = family == "qwen2" or bool(read.get("attention_bias"))
    values |= {"attention_bias": bias, "attention_out_bias": bias and family != "qwen2"}
    if family == "llama":
        values["mlp_bias"] = bool(read.get("mlp_bias"))
    if family in _GEMMA:
        values["query_scale"] = read.get("query_pre_attn_scalar")
        values["logit_softcap"] = read.get("final_logit_softcapping")
    if family == "gemma2":
        values["attention_softcap"] = read.get("attn_logit_softcapping")
    for key in ("attention_dropout", "attn_logit_softcapping", "use_bidirectional_attention"):
        if (value := read.get(key)) and not (family == "gemma2" and key == "attn_logit_softcapping"):
            read.refuse(key, value, "set it to null or 0 if that is meant")
    values |= _window(read, family, values["num_layers"]) | _rope(read, family, values["max_context"])
    read.finish()
    return ModelSection(**values).resolved(values["vocab_size"])


def config_from_section(section: ModelSection) -> dict[str, Any]:
    """The configuration of a resolved section, readable by transformers 4 and 5."""
    s = section
    if s.module is not None:
        own = {"module": s.module, "options": s.options, "vocab_size": s.vocab_size, "max_context": s.max_context}
        return {"model_type": OWN_MODULE, "truestep": own}
    gemma = s.family in _GEMMA
    architecture = next(name for name, family in (SCORERS if s.scores else ARCHITECTURES).items() if family == s.family)
    config: dict[str, Any] = {"architectures": [architecture], "model_type": _TYPES.get(s.family, s.family)}
    config |= {theirs: s.model_dump()[ours] for ours, theirs in _SAME.items()}
    config |= {"num_key_value_heads": s.num_kv_heads, "tie_word_embeddings": s.tie_embeddings}
    config |= {"head_dim": s.head_dim} if s.mla is None else mla_config(s.mla)
    if s.scores:
        config |= {"id2label": {"0": "SCORE"}, "label2id": {"SCORE": 0}}
    if s.moe is not None:
        config |= moe_config(s, s.moe)
    name = "gelu_pytorch_tanh" if s.activation == "gelu_tanh" else "silu"
    config |= {"hidden_activation" if gemma else "hidden_act": name, "initializer_range": s.init_std}
    if s.family not in ("mistral", "qwen2", "mixtral"):
        config["attention_bias"] = s.attention_out_bias
    if s.family == "llama":
        config["mlp_bias"] = s.mlp_bias
    if gemma:
        scale = s.query_scale or s.head_dim
        config["query_pre_attn_scalar"] = int(scale) if scale == int(scale) else scale
        config["final_logit_softcapping"] = s.logit_softcap
        config["attn_logit_softcapping"] = s.attention_softcap
    return config | _window_config(s) | _rope_config(s)


def _family(config: dict[str, Any], where: str) -> Family:
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES | SCORERS:
            return (ARCHITECTURES | SCORERS)[name]
    known = ", ".join(ARCHITECTURES)
    raise ModelError(f"{where} has architectures = {names!r}, which is not supported; supported are {known}.")


def _scores(config: dict[str, Any]) -> bool:
    return any(name in SCORERS for name in config.get("architectures") or [])


def _activation(read: Reader, family: Family) -> str:
    key = "hidden_activation" if family in _GEMMA else "hidden_act"
    if family in _GEMMA:
        read.get("hidden_act")  # old Gemma files carry "gelu" there, which transformers does not read
    value = read.get(key, "silu")
    if value not in _ACTIVATIONS:
        read.refuse(key, value, f"supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _window(read: Reader, family: Family, num_layers: int) -> dict[str, Any]:
    """sliding_window and full_attention_every; the pattern of `layer_types` must be one that these can say."""
    window, kinds = read.get("sliding_window"), read.get("layer_types")
    pattern = read.get("sliding_window_pattern", 6)
    if family in _UNWINDOWED:
        return {}
    if family == "qwen3_moe":
        return {"sliding_window": window if read.get("use_sliding_window", False) else None}
    if family in ("qwen2", "qwen3"):
        first = read.get("max_window_layers", 28)
        if not read.get("use_sliding_window", False) or (kinds is None and first >= num_layers):
            window = None
        elif kinds is None and first > 0:
            read.refuse("max_window_layers", first, "a window in the last layers only cannot be expressed")
    if kinds is None:
        every = {"gemma2": 2, "gemma3": pattern}.get(family, 0)
        return {"sliding_window": window, "full_attention_every": every if window else 0}
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if window is None or len(full) == len(kinds):
        return {"sliding_window": None}
    # without a full layer inside the model, gemma's usual period is as good as any beyond it
    every = full[0] + 1 if full else (num_layers + 1 if family in _GEMMA else 0)
    values = {"sliding_window": window, "full_attention_every": every}
    rule = ModelSection(num_layers=num_layers, **values)
    said = _kinds(rule)
    if said != kinds:
        read.refuse("layer_types", kinds, "full attention must come at every n-th layer")
    return values


def _kinds(s: ModelSection) -> list[str]:
    return ["sliding_attention" if s.window_of(layer) else "full_attention" for layer in range(s.num_layers)]


def _window_config(s: ModelSection) -> dict[str, Any]:
    if s.family in _UNWINDOWED:
        return {}
    if s.family in ("mistral", "mixtral"):
        return {"sliding_window": s.sliding_window}
    if s.family == "qwen3_moe":
        return {"sliding_window": s.sliding_window, "use_sliding_window": s.sliding_window is not None}
    kinds = _kinds(s)
    config: dict[str, Any] = {"layer_types": kinds, "sliding_window": s.sliding_window}
    if s.family not in _GEMMA:
        config |= {"use_sliding_window": s.sliding_window is not None, "max_window_layers": 0}
    elif s.sliding_window is None:
        config["sliding_window"] = s.max_context  # gemma's layers are full by layer_types; a number is required
    if s.family == "gemma3" and s.full_attention_every:
        config["sliding_window_pattern"] = s.full_attention_every
    return config


def _rope(read: Reader, family: Family, max_context: int) -> dict[str, Any]:
    old, new = dict(read.get("rope_scaling") or {}), dict(read.get("rope_parameters") or {})
    theta, local = read.get("rope_theta", 10_000.0), read.get("rope_local_base_freq")
    if partial := read.get("partial_rotary_factor"):
        _whole_head(read, partial)
    if family == "gemma3":
        sliding = dict(new.get("sliding_attention") or {})
        if sliding.get("rope_type", "default") != "default":
            read.refuse("rope_parameters.sliding_attention", sliding, "only full-attention layers can be scaled")
        local = sliding.get("rope_theta", local)
        new = dict(new.get("full_attention") or {})
    parameters = new or old
    theta = parameters.pop("rope_theta", None) or theta
    values: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(read, parameters, max_context)}
    if family == "gemma3":
        values["rope_local_theta"] = local
    return values


def _scaling(read: Reader, parameters: dict[str, Any], max_context: int) -> RopeScaling | None:
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    if partial := parameters.pop("partial_rotary_factor", None):
        _whole_head(read, partial)
    if kind not in _ROPE_KEYS:
        read.refuse("rope_type", kind, f"supported are {', '.join(_ROPE_KEYS)}")
    if parameters.get("truncate") is True:
        del parameters["truncate"]
    for key, value in parameters.items():
        if key not in _ROPE_KEYS[kind] and value is not None:
            read.refuse(f"{key} of {kind} rope", value, "remove it if the model does not depend on it")
    if kind == "default":
        return None
    values = {k: v for k, v in parameters.items() if v is not None}
    original = values.pop("original_max_position_embeddings", max_context)
    return (
        RopeScaling(kind=kind, **values)
        if kind == "linear"
        else RopeScaling(kind=kind, original_context=original, **values)
    )


def _whole_head(read: Reader, partial: float) -> None:
    if partial != 1.0:
        read.refuse("partial_rotary_factor", partial, "rotary positions cover the whole head here")


def _rope_config(s: ModelSection) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}
    if s.rope_scaling is not None:
        given = s.rope_scaling.model_dump() | {"original_max_position_embeddings": s.rope_scaling.original_context}
        kept = _ROPE_KEYS[s.rope_scaling.kind]
        scaling = {"rope_type": s.rope_scaling.kind} | {k: v for k, v in given.items() if k in kept and v is not None}
    old = {"rope_theta": s.rope_theta, "rope_scaling": scaling if s.rope_scaling else None}
    new: dict[str, Any] = scaling | {"rope_theta": s.rope_theta}
    if s.family != "gemma3":
        return old | {"rope_parameters": new}
    local = s.rope_local_theta or s.rope_theta
    sliding = {"rope_type": "default", "rope_theta": local}
    nested = {"full_attention": new, "sliding_attention": sliding}
    return old | {"rope_local_base_freq": local, "rope_parameters": nested}
