"""Bytes that a rank sends in a step, by axis: what ring algorithms send, and what the step asks of each axis.

Of a collective over n ranks whose result (all-gather) or input (reduce-scatter, all-to-all) is S bytes in all, a rank
sends S (n - 1) / n; an all-reduce is both. Small sums (norm, loss, gradients of biases and norms) are left out."""

from collections.abc import Iterator
from dataclasses import dataclass

from truestep.plan.memory import recomputation
from truestep.plan.setup import Setup
from truestep.plan.weights import Weights, own_heads, part_weights


@dataclass(frozen=True)
class Traffic:
    """What one rank does on an axis in a step: `count` collectives or messages, `bytes` sent in all."""

    axis: str
    what: str
    count: int
    bytes: int


def traffic(setup: Setup, rank: int) -> list[Traffic]:
    """Of a rank at index `rank` of the pipeline axis, axis by axis; axes of one rank are left out."""
    blocks = [layer for i in setup.held(rank) for layer in setup.layers[i]]
    return [
        *_tensor(setup, rank, blocks),
        *_context(setup, rank, blocks),
        *_experts(setup, blocks),
        *_pipeline(setup, rank),
        *_weights(setup, rank),
    ]


def _passes(setup: Setup, rank: int, layer: int) -> int:
    """How often a block's collectives run for a microbatch: forward, backward, and forward again to recompute."""
    return 2 if recomputation(setup, rank)[layer] == "none" else 3


def _tensor(setup: Setup, rank: int, blocks: list[int]) -> Iterator[Traffic]:
    tp, model = setup.degrees.tp, setup.model
    if tp == 1:
        return
    pairs, width = 0, model.hidden_size
    sent = 0
    for layer in blocks:
        dense = not model.has_experts(layer) or bool(model.moe and model.moe.shared_size)
        inward = width if model.mla is None else (model.mla.q_rank or width) + model.mla.kv_rank + model.mla.rope_dim
        numbers = inward + width + (2 * width if dense else 0)
        pairs += (4 if dense else 2) * _passes(setup, rank, layer)
        sent += numbers * _passes(setup, rank, layer)
    ends = (0 in setup.held(rank)) + (len(setup.layers) - 1 in setup.held(rank))  # embedding and head
    sent, pairs = sent + 2 * ends * width, pairs + 2 * ends
    tokens = setup.tokens // setup.degrees.cp
    total = setup.microbatches * tokens * sent * setup.itemsize * (tp - 1) // tp
    yield Traffic("tp", "hidden states", setup.microbatches * pairs, total)


def _context(setup: Setup, rank: int, blocks: list[int]) -> Iterator[Traffic]:
    cp, model = setup.degrees.cp, setup.model
    if cp == 1:
        return
    heads, keys = own_heads(model, setup.degrees.tp)
    keys = min(keys, heads)
    passes = sum(_passes(setup, rank, layer) for layer in blocks)
    if setup.machine.context.style == "ulysses":
        what, count, numbers = "queries, keys, values and outputs", 4, (2 * heads + 2 * keys) * model.head_dim // cp
    else:
        what, count, numbers = "keys and values", 2, 2 * keys * model.head_dim
    total = setup.microbatches * passes * setup.tokens * numbers * setup.itemsize * (cp - 1) // cp
    yield Traffic("cp", what, setup.microbatches * passes * count, total)


def _experts(setup: Setup, blocks: list[int]) -> Iterator[Traffic]:
    d, moe = setup.degrees, setup.model.moe
    if d.ep == 1 or moe is None:
        return
    sparse = sum(setup.model.has_experts(layer) for layer in blocks)
    passes = 2 if setup.recompute == "none" else 3
    rows = setup.tokens // (d.cp * d.tp) * moe.top_k
    count = setup.microbatches * sparse * 2 * passes
    total = count * rows * setup.model.hidden_size * setup.itemsize * (d.ep - 1) // d.ep
    yield Traffic("ep", "tokens to experts and back", count, total)


def _pipeline(setup: Setup, rank: int) -> Iterator[Traffic]:
    d, held, last = setup.degrees, setup.held(rank), len(setup.layers) - 1
    if d.pp == 1:
        return
    forward = sum(1 for i in held if i < last and i + 1 not in held)
    backward = sum(1 for i in held if i > 0 and i - 1 not in held)
    count = setup.microbatches * (forward + backward)
    message = setup.tokens // (d.cp * d.tp) * setup.model.hidden_size * setup.itemsize
    yield Traffic("pp", "hidden states and their gradients", count, count * message)


def _weights(setup: Setup, rank: int) -> Iterator[Traffic]:
    """The data axes: gathers of weights, reductions of gradients."""
    d, last = setup.degrees, len(setup.layers) - 1
    parts = [part_weights(setup.model, setup.layers[i], d, first=i == 0, last=i == last) for i in setup.held(rank)]
    weights = sum(parts, Weights())
    times = 1 if d.pp > 1 else setup.microbatches
    gathers = times * (2 if d.pp == 1 and setup.machine.reshard_after_forward else 1)
    units = sum(len(setup.layers[i]) for i in setup.held(rank)) + 1
    for axis, ranks, size in (("dp_shard · cp", d.dense_shard, weights.matrices), ("edp", d.edp, weights.experts)):
        if setup.sharded and ranks > 1 and size:
            share = size * (ranks - 1) // ranks
            yield Traffic(axis, "weights gathered", gathers * units, gathers * share * setup.itemsize)
            yield Traffic(axis, "gradients reduced", times * units, times * share * setup.wide)
    if d.dp_replicate > 1:
        kept = weights.on_a_rank(d) * setup.wide
        yield Traffic("dp_replicate", "gradients summed", units, 2 * kept * (d.dp_replicate - 1) // d.dp_replicate)
