"""What low-rank adapters and the frozen weights beside them take on a rank of the tensor and expert axes."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from truestep.plan.weights import Weights, own_heads
from truestep.recipe.degrees import Degrees
from truestep.recipe.model import ModelSection
from truestep.recipe.posttrain import Lora

BITS = {"int8": 8.5, "int4": 4.5, "nf4": 4.5, "fp8": 8.5}
"""Of a weight that is held in blocks of 64 elements, with a scale in 32 bits each."""


@dataclass(frozen=True)
class _Map:
    """A weight, and what one rank has of its inputs and outputs. `stack`: experts that it has."""

    name: str
    group: str
    inputs: int
    outputs: int
    stack: int = 0


def adapter_weights(model: ModelSection, lora: Lora, layers: list[int], degrees: Degrees, tables: list[str]) -> Weights:
    """Of adapters in these blocks and in `tables` ("embeddings", "head"); patterns mean what they mean in training."""
    maps = [one for layer in layers for one in _of_block(model, layer, degrees)]
    vocab = -(-model.vocab_size // degrees.tp)
    if "embeddings" in tables:
        maps.append(_Map("embed.weight", "embeddings", vocab, model.hidden_size))
    if "head" in tables and not model.tie_embeddings:
        maps.append(_Map("head.weight", "head", model.hidden_size, vocab))
    found = Weights()
    for one in maps:
        if any(target == one.group or _matches(one.name, target) for target in lora.targets):
            count = lora.rank * (one.inputs + one.outputs)
            found += Weights(experts=one.stack * count) if one.stack else Weights(count)
    return found


def _matches(name: str, target: str) -> bool:
    return fnmatchcase(name, target) or fnmatchcase(name.removesuffix(".weight"), target)


def _of_block(model: ModelSection, layer: int, degrees: Degrees) -> Iterator[_Map]:
    width, moe, tp, at = model.hidden_size, model.moe, degrees.tp, f"blocks.{layer}"
    yield from _latent(model, tp, at) if model.mla is not None else _grouped(model, tp, at)
    inner, path = model.intermediate_size, f"{at}.mlp"
    if moe is not None and model.has_experts(layer):
        held = moe.num_experts // degrees.ep
        for name in ("gate", "up", "down"):
            sizes = (moe.expert_size, width) if name == "down" else (width, moe.expert_size)
            yield _Map(f"{at}.mlp.experts.{name}", "experts", *sizes, held)
        inner, path = moe.shared_size, f"{at}.mlp.shared"
    columns = -(-inner // tp)
    if columns:
        yield _Map(f"{path}.gate.weight", "mlp", width, columns)
        yield _Map(f"{path}.up.weight", "mlp", width, columns)
        yield _Map(f"{path}.down.weight", "mlp", columns, width)


def _grouped(model: ModelSection, tp: int, at: str) -> Iterator[_Map]:
    heads, keys = own_heads(model, tp)
    size, width = model.head_dim, model.hidden_size
    for name, count in (("q", heads), ("k", keys), ("v", keys)):
        yield _Map(f"{at}.attention.{name}.weight", "attention", width, count * size)
    yield _Map(f"{at}.attention.out.weight", "attention", heads * size, width)


def _latent(model: ModelSection, tp: int, at: str) -> Iterator[_Map]:
    mla, width, heads = model.mla, model.hidden_size, -(-model.num_heads // tp)
    assert mla is not None
    sizes = {"kv_a": (width, mla.kv_rank + mla.rope_dim), "kv_b": (mla.kv_rank, heads * (mla.nope_dim + mla.v_dim))}
    if mla.q_rank:
        sizes |= {"q_a": (width, mla.q_rank), "q_b": (mla.q_rank, heads * model.head_dim)}
    else:
        sizes |= {"q": (width, heads * model.head_dim)}
    sizes |= {"out": (heads * mla.v_dim, width)}
    for name, (inputs, outputs) in sizes.items():
        yield _Map(f"{at}.attention.{name}.weight", "attention", inputs, outputs)
