"""Bytes that a rank needs in a step, by what for, and which blocks to recompute to stay below a budget.

Master weights, gradients and reductions are in fp32 (float64 where everything is), AdamW keeps two numbers of each
parameter, Muon one of the matrices of blocks. FSDP2 gathers two blocks at a time; in a pipeline all blocks of a rank
once a step, whose unsharded gradients then add up over the microbatches. Buffers of collectives, what the allocator
loses and the CUDA context are not counted."""

from collections.abc import Sequence
from dataclasses import dataclass

from truestep.plan.activations import Kept, Recompute, block_activations, head_activations
from truestep.plan.low_rank import BITS, adapter_weights
from truestep.plan.setup import Setup
from truestep.plan.weights import Weights, block_weights, part_weights
from truestep.recipe.posttrain import Lora

HEAD_CHUNK_TOKENS = 8192
"""What machine.head_chunk_tokens = 0 means on a GPU."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. `gathered`: weights in the compute dtype that are whole for a while, and gradients before they
    are shared out."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations


def rank_memory(setup: Setup, rank: int) -> RankMemory:
    """Of the fullest ranks at index `rank` of the pipeline axis."""
    weights = _weights(setup, rank)
    kept = weights.on_a_rank(setup.degrees)
    if setup.stage.lora is not None:
        return _beside_frozen(setup, rank, setup.stage.lora, weights)
    return RankMemory(
        parameters=setup.wide * kept,
        gradients=setup.wide * kept,
        optimizer=0 if setup.machine.offload_optimizer else setup.wide * _states(setup, rank, weights),
        gathered=_gathered(setup, rank, weights),
        activations=_activations(setup, rank),
    )


def _beside_frozen(setup: Setup, rank: int, lora: Lora, weights: Weights) -> RankMemory:
    """With adapters beside frozen weights, which are held in the dtype of products or in few bits, and which have
    neither gradients nor optimizer state."""
    last, held = len(setup.layers) - 1, setup.held(rank)
    tables = [name for name, there in (("embeddings", 0 in held), ("head", last in held)) if there]
    adapters = adapter_weights(setup.model, lora, _blocks(setup, rank), setup.degrees, tables)
    trained = adapters.on_a_rank(setup.degrees)
    blocks = [block_weights(setup.model, layer, setup.degrees) for layer in _blocks(setup, rank)]
    maps = sum(block.matrices for block in blocks) if lora.base != "full" else 0
    matrices = Weights(weights.matrices - maps, weights.experts).on_a_rank(setup.degrees)
    frozen = setup.itemsize * matrices + setup.wide * weights.small + round(maps * BITS.get(lora.base, 0) / 8)
    gathered = 0
    if lora.base != "full":
        gathered = 4 * max(block.matrices for block in blocks)  # a map at a time; as they are read, a block in fp32
    elif setup.sharded:
        gathered = _gathered(setup, rank, weights) - setup.wide * _gathered_gradients(setup, rank, weights)
    return RankMemory(
        parameters=frozen + setup.wide * trained,
        gradients=setup.wide * trained,
        optimizer=0 if setup.machine.offload_optimizer else 2 * setup.wide * trained,
        gathered=gathered,
        activations=_activations(setup, rank),
    )


def _gathered_gradients(setup: Setup, rank: int, weights: Weights) -> int:
    """Elements of gradients that `_gathered` counts."""
    matrices = weights.matrices + weights.experts
    if setup.degrees.pp > 1:
        return matrices
    blocks = [block_weights(setup.model, layer, setup.degrees) for layer in _blocks(setup, rank)]
    tables = matrices - sum(block.matrices + block.experts for block in blocks)
    return max(max(block.matrices + block.experts for block in blocks), tables)


def _weights(setup: Setup, rank: int) -> Weights:
    last = len(setup.layers) - 1
    parts = (
        part_weights(setup.model, setup.layers[i], setup.degrees, first=i == 0, last=i == last)
        for i in setup.held(rank)
    )
    return sum(parts, Weights())


def _blocks(setup: Setup, rank: int) -> list[int]:
    return [layer for i in setup.held(rank) for layer in setup.layers[i]]


def _states(setup: Setup, rank: int, weights: Weights) -> int:
    """Numbers of optimizer state; an optimizer of the user's own counts as AdamW."""
    adam = 2 * weights.on_a_rank(setup.degrees)
    if setup.stage.optim.kind != "muon":
        return adam
    blocks = [block_weights(setup.model, layer, setup.degrees) for layer in _blocks(setup, rank)]
    matrices = sum((Weights(block.matrices, block.experts) for block in blocks), Weights())
    return adam - matrices.on_a_rank(setup.degrees)


def _gathered(setup: Setup, rank: int, weights: Weights) -> int:
    matrices = weights.matrices + weights.experts
    if not setup.sharded:
        return setup.itemsize * matrices if setup.itemsize < setup.wide else 0  # autocast keeps its casts
    if setup.degrees.pp > 1:
        return (setup.itemsize + setup.wide) * matrices
    blocks = [block_weights(setup.model, layer, setup.degrees) for layer in _blocks(setup, rank)]
    largest = max(block.matrices + block.experts for block in blocks)
    tables = matrices - sum(block.matrices + block.experts for block in blocks)
    whole = tables + min(2, len(blocks)) * largest if setup.machine.reshard_after_forward else matrices
    return setup.itemsize * whole + setup.wide * max(largest, tables)


def _activations(setup: Setup, rank: int) -> int:
    modes = recomputation(setup, rank)
    kept = [_kept(setup, layer, mode) for layer, mode in modes.items()]
    found = round(setup.in_flight(rank) * sum(block.held for block in kept)) + max(block.remade for block in kept)
    return found + _head(setup, rank)


def _head(setup: Setup, rank: int) -> int:
    if len(setup.layers) - 1 not in setup.held(rank):
        return 0
    chunk = setup.machine.head_chunk_tokens or HEAD_CHUNK_TOKENS
    return head_activations(setup.model, setup.degrees, setup.tokens, setup.itemsize, chunk)


def _kept(setup: Setup, layer: int, mode: Recompute) -> Kept:
    return block_activations(setup.model, layer, setup.degrees, setup.tokens, setup.itemsize, mode)


def recomputation(setup: Setup, rank: int) -> dict[int, Recompute]:
    """What each block on a rank of the pipeline axis recomputes, by layer. With "auto" as little as lets activations
    fit into machine.activation_memory: first some blocks selectively, then all, then some in full, then all."""
    layers = _blocks(setup, rank)
    if setup.recompute is not None:
        return dict.fromkeys(layers, setup.recompute)
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    costs = [[_kept(setup, layer, mode) for mode in modes] for layer in layers]
    steps = fewest(costs, setup.in_flight(rank), setup.machine.activation_memory - _head(setup, rank))
    return {layer: modes[step] for layer, step in zip(layers, steps, strict=True)}


def fewest(costs: Sequence[Sequence[Kept]], in_flight: float, budget: float) -> list[int]:
    """Of each block the index into its `costs`, which fall: as many blocks as can be at the lower index, one step
    between all of them, such that the bytes fit; all at the last index where nothing does."""
    count, levels = len(costs), len(costs[0])
    for moved in range(count * (levels - 1) + 1):
        level, ahead = divmod(moved, count)
        chosen = [level + 1 if i < ahead else level for i in range(count)]
        kept = [block[step] for block, step in zip(costs, chosen, strict=True)]
        if in_flight * sum(k.held for k in kept) + max(k.remade for k in kept) <= budget:
            return chosen
    return [levels - 1] * count
