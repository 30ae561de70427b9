"""Low-rank adapters in a model that is to be trained: put in before it is laid over ranks, and told afterwards where
their inputs lie in the whole, by which dropout is drawn."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import torch
from torch import nn

from truestep.adapters.add import add_adapters, first_values
from truestep.errors import UserError
from truestep.models.decoder import Decoder
from truestep.models.layers import Linear
from truestep.models.mla import LatentAttention
from truestep.numerics.blockwise import Kind
from truestep.numerics.low_precision.draws import Draws
from truestep.numerics.low_precision.place import split_tokens
from truestep.numerics.low_rank import Dropout, is_adapter
from truestep.numerics.pieces import Piece, piece_of
from truestep.parallel.apply import Fill
from truestep.parallel.model import Parallel
from truestep.recipe.degrees import Degrees
from truestep.recipe.machine import Context
from truestep.recipe.posttrain import Lora

_ON_SHARDS = ("q_a", "kv_a")
"""Maps of latent attention that take a tensor rank's part of the sequence."""


def adapt(model: nn.Module, lora: Lora, fill: Fill, seed: int) -> Fill:
    """Freeze a model on the meta device and put adapters in. Returns what fills its parts: `fill` the frozen weights,
    the adapters such that nothing changes. UserError for a model, or targets, that cannot be."""
    if not isinstance(model, Decoder):
        raise UserError("lora adapts truestep's own models, and this is a module of your own; remove [stages.lora].")
    sites = add_adapters(model, model.sites(), lora)
    if lora.base != "full":
        fill = partial(_fill_held, fill)
        hold_in_few_bits(model, lora.base)
    tables = [site.path for site in sites if site.kind == "table"]
    return partial(_fill, fill, tables, seed)


def _fill(fill: Fill, tables: list[str], seed: int, part: nn.Module, pieces: dict[str, Piece]) -> None:
    fill(part, {name: piece for name, piece in pieces.items() if not is_adapter(name)})
    first_values(pieces, tables, seed)


def hold_in_few_bits(model: Decoder, kind: Kind) -> None:
    """Hold the weights of all linear maps of blocks, on the meta device, as codes and scales."""
    if model.moes():
        raise UserError(f"lora.base is {kind!r}, and experts cannot be held in few bits; set it to full.")
    for _, linear in _maps(model):
        with torch.device("meta"):
            linear.hold(kind)


def require_whole(lora: Lora, degrees: Degrees, low_precision: bool) -> None:
    """UserError for a mesh that would cut weights that are held in few bits."""
    if lora.base == "full":
        return
    cut = [axis for axis in ("dp_shard", "tp", "cp", "ep") if getattr(degrees, axis) > 1]
    if cut:
        raise UserError(
            f"lora.base is {lora.base!r}, which holds whole weights on every rank, but mesh.{cut[0]} is "
            f"{getattr(degrees, cut[0])}; set it to 1, and dp_replicate or pp to the number of processes."
        )
    if low_precision:
        raise UserError(
            f"lora.base is {lora.base!r}, whose weights are decoded where they are multiplied, so "
            f"numerics.low_precision would not be used; remove one of the two."
        )


def require_one_table(model: nn.Module, degrees: Degrees) -> None:
    """UserError where the adapter of a tied table would lie in two parts of a pipeline."""
    tied = isinstance(model, Decoder) and model.section.tie_embeddings
    if degrees.pp > 1 and tied and any(name.startswith("embed.lora") for name, _ in model.named_parameters()):
        raise UserError(
            f"lora.targets has embeddings, whose table is the head's as well, and mesh.pp is {degrees.pp}; leave "
            f"embeddings and head out of the targets, or set mesh.pp to 1."
        )


def _fill_held(fill: Fill, part: nn.Module, pieces: dict[str, Piece]) -> None:
    """Fill everything but what is held in few bits by `fill`; the weights of a block at a time are got and encoded."""
    codes = {name for name in pieces if ".held." in name}
    fill(part, {name: piece for name, piece in pieces.items() if name not in codes})
    if not codes:
        return
    assert isinstance(part, Decoder)
    for number, maps in groupby(_maps(part), key=lambda pair: pair[0].split(".")[1]):
        held = {f"{path}.weight": linear.held for path, linear in maps if f"{path}.held.codes" in codes}
        weights = {name: torch.empty(one.shape, device=one.codes.device) for name, one in held.items() if one}
        fill(part, {name: piece_of(weight) for name, weight in weights.items()})
        for name, weight in weights.items():
            one = held[name]
            assert one is not None, number
            one.take(weight)


def _maps(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """Linear maps of a model's blocks, by their paths, block by block."""
    for number, block in model.blocks.named_children():
        for inner, module in block.named_modules():
            if isinstance(module, Linear):
                yield f"blocks.{number}.{inner}", module


def hold_low(model: nn.Module, dtype: torch.dtype, small: Callable[[str, tuple[int, ...]], bool]) -> None:
    """Hold frozen weights on the meta device in the dtype of products, to which they would be cast anyway, but for
    those that are `small` (of a name and a shape)."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not small(name, tuple(parameter.shape)):
            parameter.data = parameter.data.to(dtype)


def place_dropout(parallel: Parallel, rate: float, context: Context, seed: int) -> None:
    """Let inputs of adapters of linear maps be dropped in training, and the step say which microbatch it is at. What a
    table looks up, and what a head's adapter multiplies, is not dropped."""
    parallel.draws = draws = parallel.draws or Draws(seed)
    axes = parallel.groups.axes
    balanced = context.parts_per_rank == 2
    for part in parallel.parts:
        assert isinstance(part, Decoder)
        shards = _maps_on_shards(part)
        for site in part.sites():
            if site.adapted is not None and site.group in ("attention", "mlp"):
                tp = axes.tp if site.holder in shards else None
                name = next(iter(site.adapted))
                split = parallel.places[f"{site.path}.{name}.a"].region.start[1]
                tokens = split_tokens(axes.cp, tp, balanced=balanced)
                site.adapted.dropout = Dropout(rate, draws, site.weight, tokens, split, site.inputs)


def _maps_on_shards(model: Decoder) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, LatentAttention):
            found |= {child for name, child in module.named_children() if name in _ON_SHARDS}
    assert all(isinstance(child, Linear) for child in found)
    return found
