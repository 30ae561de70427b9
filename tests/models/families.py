"""Tiny random models of every family, made by `transformers`."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.olmo2 import Olmo2Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

VOCAB = 61
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "initializer_range": 0.2}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 100.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
_YARN |= {"beta_fast": 4.0, "beta_slow": 1.0}
_LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}
_WINDOWS = {"sliding_window": 5, "query_pre_attn_scalar": 12, "head_dim": 16}
_GEMMA3 = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "tie_word_embeddings": True}
_LOCAL = {"rope_type": "default", "rope_theta": 50.0}
_QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 16}
_DEEPSEEK = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
_DEEPSEEK |= {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4}
_DEEPSEEK |= {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
_PLAIN = {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
_MSCALE = _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama-tied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-biases": lambda: LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, head_dim=12),
    "llama-llama3": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_LLAMA3)),
    "llama-yarn": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_YARN)),
    "llama-mscale": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_MSCALE)),
    "llama-linear": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_LINEAR)),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=5),
    "mistral-full": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen2-window": lambda: Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=0),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=16),
    "olmo2": lambda: Olmo2Config(**_SIZES),
    "gemma2": lambda: Gemma2Config(**_SIZES, **_WINDOWS, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES, **_WINDOWS, **_GEMMA3, rope_parameters={"full_attention": dict(_LINEAR), "sliding_attention": _LOCAL}
    ),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=5),
    "mixtral-window": lambda: MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=3, sliding_window=5),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SIZES, **_QWEN_MOE, norm_topk_prob=True),
    "qwen3-moe-sparse": lambda: Qwen3MoeConfig(
        **_SIZES, **_QWEN_MOE, attention_bias=True, decoder_sparse_step=2, use_sliding_window=True, sliding_window=5
    ),
    "qwen3-moe-dense": lambda: Qwen3MoeConfig(**_SIZES, **_QWEN_MOE, mlp_only_layers=[0], tie_word_embeddings=True),
    "deepseek": lambda: DeepseekV3Config(**_SIZES | _DEEPSEEK),
    "deepseek-plain": lambda: DeepseekV3Config(**_SIZES | _DEEPSEEK | _PLAIN, attention_bias=True),
    "deepseek-yarn": lambda: DeepseekV3Config(**_SIZES | _DEEPSEEK, rope_parameters=dict(_MSCALE)),
}


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """A model of `CONFIGS[name]`, float32, with every parameter random (norms, biases and those of choice too)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model
