"""[model]: the architecture as data, with its parameter and FLOP counts."""

from dataclasses import dataclass
from typing import Any, Literal

from truestep.errors import ModelError
from truestep.recipe.families import FAMILIES, Family
from truestep.recipe.mla import Mla
from truestep.recipe.moe import Moe
from truestep.recipe.section import Section, field

COUNTING_RULE = (
    "matmul-2: a multiply-add is 2 FLOP; every matrix product is counted and nothing else: embedding look-up 0, head "
    "2 x vocabulary x width per token (tied or not), attention 2 x heads x (key size + value size) per query-key pair; "
    "of experts, those that a token goes to; a row is one document; backward is twice forward; recomputation is not "
    "counted"
)


class RopeScaling(Section):
    """Scaling of rotary frequencies. linear: divide by factor; llama3: Llama 3.1's rule; yarn: arXiv 2309.00071."""

    kind: Literal["linear", "llama3", "yarn"] = field(help="which rule")
    factor: float = field(help="context extension factor", gt=0)
    original_context: int = field(8192, help="llama3, yarn: context length of pretraining before the extension", gt=0)
    low_freq_factor: float = field(1.0, help="llama3 only", gt=0)
    high_freq_factor: float = field(4.0, help="llama3 only; above low_freq_factor", gt=0)
    beta_fast: float = field(32.0, help="yarn only", gt=0)
    beta_slow: float = field(1.0, help="yarn only", gt=0)
    attention_factor: float | None = field(
        None, help="yarn only; by default m(mscale) / m(mscale_all_dim), where m(s) = 0.1 s ln(factor) + 1", gt=0
    )
    mscale: float | None = field(
        None, help="yarn only: with mscale_all_dim, of the factor on rotary tables (without both: m(1))", gt=0
    )
    mscale_all_dim: float | None = field(
        None, help="yarn only: besides, latent attention multiplies its scores by m(mscale_all_dim)^2", gt=0
    )


@dataclass(frozen=True)
class ParamCounts:
    """Parameters by what they are for. A tied head counts once, under `embedding`; biases count with their matrix;
    shared experts count under `mlp`. `active_experts` are those of the `experts` that one token goes to."""

    embedding: int
    head: int
    attention: int
    mlp: int
    norm: int
    router: int = 0
    experts: int = 0
    active_experts: int = 0

    @property
    def total(self) -> int:
        """Parameters stored."""
        return self.embedding + self.head + self.attention + self.mlp + self.norm + self.router + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token goes through: all of them in a dense model."""
        return self.total - self.experts + self.active_experts


def attention_pairs(context: int, window: int | None = None, causal: bool = True) -> int:
    """Query-key pairs of one row. Causal: T(T+1)/2, or with a window of N (itself included) the sum of min(i, N).
    Not causal: T^2, what a kernel without block skipping computes, window or not."""
    if not causal:
        return context * context
    reach = min(context, window or context)
    return reach * (reach + 1) // 2 + (context - reach) * reach


class ModelSection(Section):
    """One decoder-only transformer. Names are those of Hugging Face configurations, to copy sizes over."""

    module: str | None = field(
        None,
        help='a model of your own by import path, "package.module:Class"; '
        "then only options, vocab_size and max_context apply",
    )
    options: dict[str, Any] = field({}, help="keyword arguments for `module`")
    family: Family = field("llama", help="which Hugging Face architecture to write; sets the defaults of open options")
    vocab_size: int = field(0, help="rows of the embedding; 0 takes the tokenizer's size", ge=0)
    hidden_size: int = field(256, help="width of the residual stream", gt=0)
    intermediate_size: int = field(
        0, help="width of the gated MLP; 0 means 8/3 of hidden_size rounded up to a multiple of 64", ge=0
    )
    num_layers: int = field(4, help="number of blocks", gt=0)
    num_heads: int = field(4, help="query heads", gt=0)
    num_kv_heads: int = field(0, help="key/value heads (grouped-query attention); 0 means num_heads", ge=0)
    head_dim: int = field(0, help="size of a head; 0 means hidden_size / num_heads", ge=0)
    max_context: int = field(4096, help="longest row (max_position_embeddings)", gt=0)
    tie_embeddings: bool = field(False, help="the head uses the embedding's weight")
    norm_eps: float = field(1e-5, help="epsilon of RMSNorm", gt=0)
    rope_theta: float = field(10000.0, help="rotary base", gt=0)
    rope_scaling: RopeScaling | None = field(None, help="context extension")
    rope_local_theta: float | None = field(
        None, help="gemma3: rotary base of sliding-window layers, by default 10000 (other families: rope_theta)", gt=0
    )
    attention_bias: bool | None = field(
        None, help="biases on q, k, v; by default those of the family (qwen2 has them), else as attention_out_bias"
    )
    attention_out_bias: bool = field(False, help="bias on the attention's output projection (llama's attention_bias)")
    mlp_bias: bool = field(False, help="biases in the MLP")
    qk_norm: Literal["none", "head", "full"] | None = field(
        None, help="RMSNorm of q and k: per head (qwen3, gemma3) or over the whole projection (olmo2)"
    )
    norm_placement: Literal["pre", "post", "sandwich"] | None = field(
        None, help="pre (llama), post: norm of a branch's output only (olmo2), sandwich: both (gemma2, gemma3)"
    )
    norm_offset: bool | None = field(None, help="scale is 1 + weight (gemma)")
    embed_scale: bool | None = field(None, help="multiply embeddings by sqrt(hidden_size) (gemma)")
    activation: Literal["silu", "gelu_tanh"] | None = field(None, help="SwiGLU or GeGLU")
    sliding_window: int | None = field(
        None, help="attend to the last N tokens only (itself included), but for layers of full_attention_every", gt=0
    )
    full_attention_every: int = field(
        0, help="with sliding_window: every n-th layer attends in full (2 for gemma2, 6 for gemma3); 0 = none", ge=0
    )
    attention_softcap: float | None = field(None, help="cap * tanh(score / cap) on attention scores (gemma2: 50)", gt=0)
    logit_softcap: float | None = field(None, help="the same on output logits (gemma2: 30)", gt=0)
    query_scale: float | None = field(
        None, help="attention scores are scaled by query_scale ** -0.5; by default head_dim", gt=0
    )
    moe: Moe | None = field(None, help="experts instead of the MLP (mixtral, qwen3_moe, deepseek_v3)")
    mla: Mla | None = field(None, help="multi-head latent attention (deepseek_v3)")
    scores: bool = field(
        False, help="one score a token instead of logits; not to be set: kind = reward_model makes such a model"
    )
    init_std: float = field(
        0.02,
        help="standard deviation of the initial weights; "
        "projections back into the residual stream use init_std / sqrt(2 num_layers)",
        gt=0,
    )

    def resolved(self, vocab_size: int) -> "ModelSection":
        """This section with every open value filled in. `vocab_size` is the tokenizer's; a larger embedding is kept, a
        smaller one is a ModelError. A model of your own (`module`) gets its vocabulary only."""
        if 0 < self.vocab_size < vocab_size:
            raise ModelError(
                f"model.vocab_size is {self.vocab_size}, but the tokenizer has {vocab_size} ids; "
                f"set it to {vocab_size} or more, or to 0 to take the tokenizer's."
            )
        if self.module is not None:
            return self.model_copy(update={"vocab_size": self.vocab_size or vocab_size})
        rules = FAMILIES[self.family]
        head_dim, keys = self.head_dim or self.hidden_size // self.num_heads, self.num_kv_heads or self.num_heads
        if self.mla is not None:
            head_dim, keys = self.mla.nope_dim + self.mla.rope_dim, self.num_heads
        inner = self.intermediate_size or -(-8 * self.hidden_size // 192) * 64
        sizes = {
            "vocab_size": self.vocab_size or vocab_size,
            "intermediate_size": inner,
            "num_kv_heads": keys,
            "head_dim": head_dim,
            "moe": self._resolved_moe(inner),
        }
        options = rules.structure | {
            "activation": rules.activation,
            "attention_bias": rules.bias == "qkv" or self.attention_out_bias,
            "query_scale": float(head_dim),
            "rope_local_theta": 10000.0 if self.family == "gemma3" else self.rope_theta,
        }
        open_options = {name: value for name, value in options.items() if getattr(self, name) is None}
        return self.model_copy(update=sizes | open_options)

    def scoring(self) -> "ModelSection":
        """The same model with a score head instead of that of the vocabulary."""
        return self.model_copy(update={"scores": True, "tie_embeddings": False})

    @property
    def head_rows(self) -> int:
        """Outputs of the head."""
        return 1 if self.scores else self.vocab_size

    def _resolved_moe(self, inner: int) -> Moe | None:
        if self.moe is None:
            return None
        sigmoid = self.family == "deepseek_v3"
        return self.moe.model_copy(
            update={
                "expert_size": self.moe.expert_size or inner,
                "scoring": self.moe.scoring or ("sigmoid" if sigmoid else "softmax"),
                "balance": self.moe.balance or ("bias" if sigmoid else "aux"),
            }
        )

    def window_of(self, layer: int) -> int | None:
        """The sliding window of block `layer` (0-based); None where it attends to the whole row."""
        every = self.full_attention_every
        return None if every and (layer + 1) % every == 0 else self.sliding_window

    def has_experts(self, layer: int) -> bool:
        """Whether block `layer` (0-based) has experts instead of the dense MLP."""
        return self.moe is not None and self.moe.in_layer(layer)

    @property
    def num_expert_layers(self) -> int:
        """Blocks with experts."""
        return sum(self.has_experts(layer) for layer in range(self.num_layers))

    def counts(self) -> ParamCounts:
        """Parameters of a resolved section, exactly those of the built model."""
        self._check_countable()
        width, layers, sparse, moe = self.hidden_size, self.num_layers, self.num_expert_layers, self.moe
        table = self.vocab_size * width
        mlp = 3 * width * self.intermediate_size + (2 * self.intermediate_size + width if self.mlp_bias else 0)
        shared = 3 * width * moe.shared_size + (2 * moe.shared_size + width if self.mlp_bias else 0) if moe else 0
        expert = 3 * width * moe.expert_size if moe else 0
        norm = (4 if self.norm_placement == "sandwich" else 2) * width + self._attention_norms()
        return ParamCounts(
            embedding=table,
            head=0 if self.tie_embeddings else self.head_rows * width,
            attention=layers * (self._attention_products() + self._attention_biases()),
            mlp=(layers - sparse) * mlp + (sparse * shared if moe and moe.shared_size else 0),
            norm=layers * norm + width,
            router=sparse * width * moe.num_experts if moe else 0,
            experts=sparse * expert * moe.num_experts if moe else 0,
            active_experts=sparse * expert * moe.top_k if moe else 0,
        )

    def _attention_products(self) -> int:
        """Multiply-adds of a token's projections in one block, which are also the elements of their matrices."""
        width, heads, mla = self.hidden_size, self.num_heads, self.mla
        if mla is None:
            return 2 * width * (heads + self.num_kv_heads) * self.head_dim
        q = heads * self.head_dim
        queries = mla.q_rank * (width + q) if mla.q_rank else width * q
        keys = width * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
        return queries + keys + heads * mla.v_dim * width

    def _attention_biases(self) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        inner = queries + 2 * keys if self.mla is None else self.mla.q_rank + self.mla.kv_rank + self.mla.rope_dim
        return (inner if self.attention_bias else 0) + (self.hidden_size if self.attention_out_bias else 0)

    def _attention_norms(self) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.mla is not None:
            return self.mla.q_rank + self.mla.kv_rank
        return {"none": 0, "head": 2 * self.head_dim, "full": queries + keys}[str(self.qk_norm)]

    def flops_per_row(self, context: int, causal: bool = True) -> int:
        """Forward FLOPs of one row of `context` tokens by COUNTING_RULE. causal=False counts attention as T^2 pairs."""
        self._check_countable()
        width, sparse, moe = self.hidden_size, self.num_expert_layers, self.moe
        products = self.num_layers * self._attention_products() + self.head_rows * width
        products += (self.num_layers - sparse) * 3 * width * self.intermediate_size
        if moe is not None:
            products += sparse * width * (moe.num_experts + 3 * (moe.top_k * moe.expert_size + moe.shared_size))
        pairs = sum(attention_pairs(context, self.window_of(layer), causal) for layer in range(self.num_layers))
        sizes = self.head_dim + (self.head_dim if self.mla is None else self.mla.v_dim)
        return 2 * products * context + 2 * self.num_heads * sizes * pairs

    def flops_per_token(self, context: int, causal: bool = True) -> float:
        """Forward FLOPs of a token, averaged over a row of `context` tokens."""
        return self.flops_per_row(context, causal) / context

    def train_flops(self, tokens: int, context: int, causal: bool = True) -> float:
        """Forward and backward FLOPs of `tokens` tokens in rows of `context`."""
        return 3 * self.flops_per_row(context, causal) * tokens / context

    def _check_countable(self) -> None:
        if self.module is not None:
            raise ModelError(
                f"model.module is {self.module}: the recipe cannot count a model of your own; count the built module."
            )
        if not (self.vocab_size and self.head_dim and self.qk_norm):
            raise ValueError("only a resolved section can be counted; call resolved(vocab_size) first")
