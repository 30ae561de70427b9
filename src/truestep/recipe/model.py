"""[model]: the architecture as data, with its parameter and FLOP counts."""

from typing import Any, Literal

from truestep.recipe.section import Section, field

Family = Literal["llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3"]


class RopeScaling(Section):
    """Scaling of rotary frequencies. linear: divide by factor; llama3: Llama 3.1's piecewise rule; yarn: arXiv 2309.00071."""

    kind: Literal["linear", "llama3", "yarn"] = field(help="which rule")
    factor: float = field(help="context extension factor", gt=0)
    original_context: int = field(8192, help="context length of pretraining before the extension", gt=0)
    low_freq_factor: float = field(1.0, help="llama3 only")
    high_freq_factor: float = field(4.0, help="llama3 only")
    beta_fast: float = field(32.0, help="yarn only")
    beta_slow: float = field(1.0, help="yarn only")
    attention_factor: float | None = field(None, help="yarn only; by default 0.1 ln(factor) + 1")


class ModelSection(Section):
    """One decoder-only transformer. Names are those of Hugging Face configurations, so that sizes can be copied over."""

    module: str | None = field(None, help='a model of your own by import path, "package.module:Class"; then only `options`, `vocab_size` and `max_context` apply')
    options: dict[str, Any] = field({}, help="keyword arguments for `module`")
    family: Family = field("llama", help="which Hugging Face architecture to write; sets the defaults of the options below")
    vocab_size: int = field(0, help="rows of the embedding; 0 takes the tokenizer's size", ge=0)
    hidden_size: int = field(256, help="width of the residual stream", gt=0)
    intermediate_size: int = field(0, help="width of the gated MLP; 0 means 8/3 of hidden_size rounded up to a multiple of 64", ge=0)
    num_layers: int = field(4, help="number of blocks", gt=0)
    num_heads: int = field(4, help="query heads", gt=0)
    num_kv_heads: int = field(0, help="key/value heads (grouped-query attention); 0 means num_heads", ge=0)
    head_dim: int = field(0, help="size of a head; 0 means hidden_size / num_heads", ge=0)
    max_context: int = field(4096, help="longest row (max_position_embeddings)", gt=0)
    tie_embeddings: bool = field(False, help="the head uses the embedding's weight")
    norm_eps: float = field(1e-5, help="epsilon of RMSNorm", gt=0)
    rope_theta: float = field(10000.0, help="rotary base", gt=0)
    rope_scaling: RopeScaling | None = field(None, help="context extension")
    rope_local_theta: float | None = field(None, help="rotary base of sliding-window layers (gemma3); by default rope_theta")
    attention_bias: bool | None = field(None, help="biases on q, k, v (by default true for qwen2 only)")
    attention_out_bias: bool = field(False, help="bias on the attention's output projection (llama's attention_bias=true)")
    mlp_bias: bool = field(False, help="biases in the MLP")
    qk_norm: Literal["none", "head", "full"] | None = field(None, help="RMSNorm of q and k: per head (qwen3, gemma3) or over the whole projection (olmo2)")
    norm_placement: Literal["pre", "post", "sandwich"] | None = field(None, help="pre (llama), post: norm of a branch's output only (olmo2), sandwich: both (gemma2, gemma3)")
    norm_offset: bool | None = field(None, help="scale is 1 + weight (gemma)")
    embed_scale: bool | None = field(None, help="multiply embeddings by sqrt(hidden_size) (gemma)")
    activation: Literal["silu", "gelu_tanh"] | None = field(None, help="SwiGLU or GeGLU")
    sliding_window: int | None = field(None, help="attend to the last N tokens only, in the layers that `full_attention_every` leaves", gt=0)
    full_attention_every: int = field(0, help="with sliding_window: every n-th layer attends in full (2 for gemma2, 6 for gemma3); 0 = none", ge=0)
    attention_softcap: float | None = field(None, help="cap * tanh(score / cap) on attention scores (gemma2: 50)", gt=0)
    logit_softcap: float | None = field(None, help="the same on output logits (gemma2: 30)", gt=0)
    query_scale: float | None = field(None, help="attention scores are scaled by query_scale ** -0.5; by default head_dim", gt=0)
    init_std: float = field(0.02, help="standard deviation of the initial weights; projections back into the residual stream use init_std / sqrt(2 num_layers)", gt=0)
