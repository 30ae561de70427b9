"""How many parameters lie on a rank of the tensor and expert axes, before the data axes share them further.

Counted for the fullest rank, where heads, columns or the vocabulary do not divide."""

from dataclasses import dataclass

from truestep.recipe.degrees import Degrees
from truestep.recipe.model import ModelSection


@dataclass(frozen=True)
class Weights:
    """`matrices` are sharded over dp_shard and cp, `experts` over edp, `small` (norms, biases, routers) not at all."""

    matrices: int = 0
    experts: int = 0
    small: int = 0

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.matrices + other.matrices, self.experts + other.experts, self.small + other.small)

    @property
    def total(self) -> int:
        return self.matrices + self.experts + self.small

    def on_a_rank(self, degrees: Degrees) -> int:
        """Parameters whose master weights, gradients and optimizer state one rank keeps."""
        return -(-self.matrices // degrees.dense_shard) + -(-self.experts // degrees.edp) + self.small


def own_heads(model: ModelSection, tp: int) -> tuple[int, int]:
    """Query heads, and key/value heads whose weights it holds, of the fullest tensor rank."""
    queries, keys = model.num_heads, model.num_kv_heads
    return _share(queries, tp), keys // tp if queries % tp == 0 and keys % tp == 0 else keys


def block_weights(model: ModelSection, layer: int, degrees: Degrees) -> Weights:
    """Those of block `layer` of a resolved section."""
    width, moe = model.hidden_size, model.moe
    inner = model.intermediate_size
    experts = router = 0
    if moe is not None and model.has_experts(layer):
        inner, router = moe.shared_size, moe.num_experts * width
        experts = moe.num_experts // degrees.ep * 3 * width * moe.expert_size
    columns = _share(inner, degrees.tp)
    biases = 2 * columns + width if model.mlp_bias and inner else 0
    norms = (4 if model.norm_placement == "sandwich" else 2) * width
    mlp = Weights(3 * width * columns, experts, biases + norms + router)
    return mlp + (_latent(model, degrees.tp) if model.mla is not None else _grouped(model, degrees.tp))


def _grouped(model: ModelSection, tp: int) -> Weights:
    """Grouped-query attention."""
    heads, keys = own_heads(model, tp)
    size = (heads + keys) * model.head_dim
    biases = (size + keys * model.head_dim if model.attention_bias else 0) + _out_bias(model)
    norms = {"none": 0, "head": 2 * model.head_dim, "full": size}[str(model.qk_norm)]
    return Weights(2 * model.hidden_size * size, 0, biases + norms)


def _latent(model: ModelSection, tp: int) -> Weights:
    """Multi-head latent attention: what makes the latent vectors is whole on every rank."""
    mla, width, heads = model.mla, model.hidden_size, _share(model.num_heads, tp)
    assert mla is not None
    whole = width * (mla.q_rank + mla.kv_rank + mla.rope_dim)
    a_head = (mla.q_rank or width) * model.head_dim + mla.kv_rank * (mla.nope_dim + mla.v_dim) + mla.v_dim * width
    norms = mla.q_rank + mla.kv_rank
    biases = (norms + mla.rope_dim if model.attention_bias else 0) + _out_bias(model)
    return Weights(whole + heads * a_head, 0, norms + biases)


def _out_bias(model: ModelSection) -> int:
    return model.hidden_size if model.attention_out_bias else 0


def table_weights(model: ModelSection, tp: int) -> Weights:
    """An embedding table, or an output matrix."""
    return Weights(_share(model.vocab_size, tp) * model.hidden_size)


def part_weights(model: ModelSection, layers: range, degrees: Degrees, *, first: bool, last: bool) -> Weights:
    """Those of a pipeline stage. A tied table is a copy on the last stage, if that is not the first as well."""
    found = sum((block_weights(model, layer, degrees) for layer in layers), Weights())
    if first:
        found += table_weights(model, degrees.tp)
    if last:
        found += Weights(small=model.hidden_size)
    if last and model.scores:
        found += Weights(small=model.hidden_size)
    elif last and not (first and model.tie_embeddings):
        found += table_weights(model, degrees.tp)
    return found


def _share(number: int, ranks: int) -> int:
    """The largest part of `number` things over `ranks`, as equal as can be."""
    return -(-number // ranks)
