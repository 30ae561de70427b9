"""Bytes of activations that a rank keeps for the backward pass: every tensor that autograd saves in a block, counted.

Counted as on a GPU, with fused attention and normalisation, 2-byte or wider `itemsize`; rotary tables and masks, which
layers share, are left out. Rows are of T tokens, of which a rank has T / cp inside attention and MLP, and T / (cp tp)
between them (sequence parallelism, arXiv 2205.05198). Of experts the mean load is counted."""

from dataclasses import dataclass
from typing import Literal

from truestep.plan.weights import own_heads
from truestep.recipe.degrees import Degrees
from truestep.recipe.model import ModelSection

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Kept:
    """Bytes that one block keeps of one microbatch, and those that its backward pass needs for a while besides, to
    make again what was not kept."""

    held: int
    remade: int


def block_activations(
    model: ModelSection, layer: int, degrees: Degrees, tokens: int, itemsize: int, recompute: Recompute
) -> Kept:
    """Of block `layer` for `tokens` tokens of a microbatch (rows times T, over all of cp and tp)."""
    inside, between = tokens // degrees.cp, tokens // (degrees.cp * degrees.tp)
    whole = inside * _inside(model, layer, degrees, itemsize) + between * _between(model, layer, itemsize)
    entry = between * model.hidden_size * itemsize
    if recompute == "none":
        return Kept(whole, 0)
    if recompute == "full":
        return Kept(entry, whole)
    kept = entry + inside * _products(model, layer, degrees, itemsize) + 2 * entry
    return Kept(kept, max(0, whole - kept + entry))


def _inside(model: ModelSection, layer: int, degrees: Degrees, size: int) -> int:
    """Bytes a token between the gather and the scatter of attention and of the MLP."""
    heads, keys = own_heads(model, degrees.tp)
    if keys * degrees.tp != model.num_kv_heads:
        keys = min(keys, heads)  # computed are those that the rank's queries need
    width, inner = model.hidden_size, _columns(model, layer, degrees.tp)
    if model.mla is None:
        attention = width + 2 * heads * model.head_dim + 2 * keys * model.head_dim
    else:
        mla = model.mla
        latent = (mla.q_rank or width) + mla.kv_rank
        attention = latent + heads * (2 * model.head_dim + 2 * mla.v_dim)
    wide = (heads + keys) * model.head_dim * max(size, 4)
    norms = {"none": 0, "head": wide + 4 * (heads + keys), "full": wide + 8}[str(model.qk_norm)]
    mlp = (width if inner else 0) + 4 * inner
    return size * (attention + mlp) + norms + 4 * heads  # and log-sum-exp of every query


def _between(model: ModelSection, layer: int, size: int) -> int:
    """Bytes a token of the rank's own part of the sequence: what norms keep (in fp32 at least), and experts."""
    norms = 4 if model.norm_placement == "sandwich" else 2
    kept = norms * (max(size, 4) * model.hidden_size + 4)
    latent = 0
    if model.mla is not None:  # hidden state before, and latent vectors before and in their norms
        latent = size * model.hidden_size + max(size, 4) * (model.mla.q_rank + model.mla.kv_rank)
    moe = model.moe
    if moe is None or not model.has_experts(layer):
        return kept + latent
    expert = moe.top_k * (2 * model.hidden_size + 4 * moe.expert_size)
    router = max(size, 4) * (model.hidden_size + 2 * moe.num_experts)
    return kept + latent + size * expert + router


def _products(model: ModelSection, layer: int, degrees: Degrees, size: int) -> int:
    """Bytes a token of the results of matrix products, but for those of the output and down projections."""
    heads, keys = own_heads(model, degrees.tp)
    return size * ((heads + 2 * keys) * model.head_dim + 2 * _columns(model, layer, degrees.tp))


def _columns(model: ModelSection, layer: int, tp: int) -> int:
    moe = model.moe
    inner = moe.shared_size if moe is not None and model.has_experts(layer) else model.intermediate_size
    return -(-inner // tp)


def head_activations(model: ModelSection, degrees: Degrees, tokens: int, itemsize: int, chunk_tokens: int) -> int:
    """Of the last norm and the fused head and loss for one microbatch: hidden states and their gradient, a chunk of
    logits in fp32 with its gradient, and the output matrix's gradient in fp32."""
    inside, between = tokens // degrees.cp, tokens // (degrees.cp * degrees.tp)
    rows = -(-model.vocab_size // degrees.tp)
    hidden = max(itemsize, 4) * between * model.hidden_size + 2 * itemsize * inside * model.hidden_size
    logits = min(chunk_tokens, inside) * rows * (max(itemsize, 4) + itemsize)
    return hidden + logits + max(itemsize, 4) * rows * model.hidden_size
