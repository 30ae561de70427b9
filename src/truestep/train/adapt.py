"""Low-rank adapters in a model that is to be trained: put in before it is laid over ranks, and told afterwards where
their inputs lie in the whole, by which dropout is drawn."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from truestep.adapters.add import add_adapters, first_values
from truestep.errors import UserError
from truestep.models.decoder import Decoder
from truestep.models.layers import Linear
from truestep.models.mla import LatentAttention
from truestep.numerics.low_precision.draws import Draws
from truestep.numerics.low_precision.place import split_tokens
from truestep.numerics.low_rank import Dropout, is_adapter
from truestep.numerics.pieces import Piece
from truestep.parallel.apply import Fill
from truestep.parallel.model import Parallel
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
    tables = [site.path for site in sites if site.kind == "table"]
    return partial(_fill, fill, tables, seed)


def _fill(fill: Fill, tables: list[str], seed: int, part: nn.Module, pieces: dict[str, Piece]) -> None:
    fill(part, {name: piece for name, piece in pieces.items() if not is_adapter(name)})
    first_values(pieces, tables, seed)


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
