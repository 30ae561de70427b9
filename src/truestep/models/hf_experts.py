"""[model.moe] and [model.mla] in `config.json`, both ways."""

from typing import Any

from truestep.models.hf_reader import Reader
from truestep.recipe.families import Family
from truestep.recipe.mla import Mla
from truestep.recipe.model import ModelSection
from truestep.recipe.moe import Moe

TRAINING = "truestep_router"
"""Our key for what `transformers` has no place for: how the router is trained."""

_OF_TRAINING = ("balance", "balance_coefficient", "bias_rate", "counts", "z_loss")
_MLA = {  # ours: theirs
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}


def moe_from_config(read: Reader, family: Family, num_layers: int, intermediate_size: int) -> Moe:
    """The experts of a configuration, with how they were trained where the configuration is of ours."""
    values: dict[str, Any] = {"num_experts": _num_experts(read), "top_k": read.need("num_experts_per_tok")}
    values |= {"expert_size": intermediate_size, "normalise": True}
    if family != "mixtral":
        values |= {"expert_size": read.need("moe_intermediate_size"), "normalise": bool(read.get("norm_topk_prob"))}
    if family == "qwen3_moe":
        values |= _sparse_layers(read, num_layers)
    if family == "deepseek_v3":
        values |= {"dense_layers": read.get("first_k_dense_replace") or 0, "scale": read.get("routed_scaling_factor")}
        values |= {"groups": read.get("n_group") or 1, "shared_size": _shared_size(read, values["expert_size"])}
        top_groups = read.get("topk_group") or 1
        values["top_groups"] = top_groups if values["groups"] > 1 else 1
        read.only("moe_layer_freq", (1,), "experts in every block but the first ones is what can be expressed")
        read.only("scoring_func", ("sigmoid",), "DeepSeek-V3 scores by sigmoid")
        read.only("topk_method", ("noaux_tc",), "DeepSeek-V3 chooses groups by their two best scores")
    read.only("router_jitter_noise", (0, 0.0), "noise on the router's input is not supported; set it to 0")
    if values["top_k"] == 1 and values["normalise"]:
        read.refuse("num_experts_per_tok", 1, "with normalised weights the router could not learn")
    given = read.get(TRAINING) or {}
    return Moe(**values, **{name: given[name] for name in _OF_TRAINING if name in given})


def moe_config(section: ModelSection, moe: Moe) -> dict[str, Any]:
    """The keys of a resolved section's experts."""
    config: dict[str, Any] = {"num_experts_per_tok": moe.top_k}
    config |= {TRAINING: {name: value for name, value in moe if name in _OF_TRAINING}}
    if section.family == "mixtral":
        return config | {"num_local_experts": moe.num_experts, "intermediate_size": moe.expert_size}
    config |= {"moe_intermediate_size": moe.expert_size, "norm_topk_prob": moe.normalise}
    if section.family == "qwen3_moe":
        dense = list(range(min(moe.dense_layers, section.num_layers)))
        return config | {"num_experts": moe.num_experts, "decoder_sparse_step": moe.every, "mlp_only_layers": dense}
    config |= {"n_routed_experts": moe.num_experts, "n_shared_experts": moe.shared_size // moe.expert_size}
    config |= {"routed_scaling_factor": moe.scale, "n_group": moe.groups, "topk_group": moe.top_groups}
    config |= {"first_k_dense_replace": moe.dense_layers, "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
    return config | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def mla_from_config(read: Reader, num_heads: int) -> Mla:
    """The latent attention of a configuration."""
    values = {ours: read.need(theirs) for ours, theirs in _MLA.items()}
    interleave = read.get("rope_interleave")
    values |= {"q_rank": read.get("q_lora_rank") or 0, "interleave": interleave is None or bool(interleave)}
    read.only("num_key_value_heads", (num_heads,), f"latent attention has as many as query heads, {num_heads}")
    read.only("head_dim", (values["rope_dim"],), f"in DeepSeek-V3 it is qk_rope_head_dim, {values['rope_dim']}")
    whole = values["nope_dim"] + values["rope_dim"]
    read.only("qk_head_dim", (whole,), f"it is the sum of qk_nope_head_dim and qk_rope_head_dim, {whole}")
    return Mla(**values)


def mla_config(mla: Mla) -> dict[str, Any]:
    """The keys of latent attention."""
    config: dict[str, Any] = {theirs: dict(mla)[ours] for ours, theirs in _MLA.items()}
    return config | {"q_lora_rank": mla.q_rank or None, "rope_interleave": mla.interleave}


def _num_experts(read: Reader) -> int:
    """Three names, of which transformers reads all."""
    found = [read.get(key) for key in ("n_routed_experts", "num_experts", "num_local_experts")]
    return next((count for count in found if count), None) or read.need("num_experts")


def _shared_size(read: Reader, expert_size: int) -> int:
    count = read.get("n_shared_experts")
    if not count:
        read.refuse("n_shared_experts", count, "a DeepSeek-V3 model has one or more")
    return count * expert_size


def _sparse_layers(read: Reader, num_layers: int) -> dict[str, int]:
    """dense_layers and every; blocks without experts must be the first ones, or those between every n-th."""
    every, dense = read.get("decoder_sparse_step") or 1, read.get("mlp_only_layers") or []
    sparse = [i for i in range(num_layers) if i not in dense and (i + 1) % every == 0]
    first = max((i + 1 for i in dense if i < num_layers), default=0)
    if sparse != [i for i in range(num_layers) if i >= first and (i + 1) % every == 0]:
        read.refuse("mlp_only_layers", dense, "only the first blocks can be without experts")
    return {"dense_layers": first, "every": every}
