"""Low precision put into a model that was made parallel: each linear map of its blocks is told where its operands lie
in the global ones, over which scales and random draws are defined."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from truestep.models.decoder import Decoder
from truestep.models.layers import Attention, Linear
from truestep.models.mla import LatentAttention
from truestep.models.moe import Experts
from truestep.numerics.low_precision.experts import LowPrecisionExperts
from truestep.numerics.low_precision.place import Place, split_tokens
from truestep.numerics.low_precision.product import LowPrecisionModel
from truestep.numerics.low_precision.rules import is_low
from truestep.numerics.pieces import Split
from truestep.parallel.model import Parallel
from truestep.recipe.machine import Context
from truestep.recipe.numerics import LowPrecision


def compute_low(parallel: Parallel, section: LowPrecision, context: Context, length: int, seed: int) -> None:
    """Give every linear map that is to be low its product. `length`: tokens of a row. UserError where blocks of values
    that share a scale would not fit a rank's part."""
    low = LowPrecisionModel(section, seed, parallel.device)
    parallel.draws = low.draws
    for part in parallel.parts:
        assert isinstance(part, Decoder)
        layers, splits, roles = part.section.num_layers, part.splits(), part.roles()
        for number, block in part.blocks.named_children():
            if not section.is_low_layer(int(number), layers):
                continue
            for inner, module in block.named_modules():
                name = f"blocks.{number}.{inner}"
                if isinstance(module, Experts):
                    _lower_experts(module, section, name)
                for map_name, linear in _own_maps(module):
                    parameter = f"{name}.{map_name}.weight"
                    if is_low(section, roles[parameter], int(number), layers):
                        place = _place(module, map_name, parameter, splits.get(parameter), parallel, context)
                        outputs, inputs = linear.weight.shape
                        linear.product = low.product(place, (outputs, inputs), length)


def computes_low(parallel: Parallel) -> bool:
    """Whether some product is in low precision."""
    return any(_has_product(module) for part in parallel.parts for module in part.modules())


@contextmanager
def products_high(parallel: Parallel) -> Iterator[None]:
    """Inside, nothing is computed in low precision: the same weights as plain products; afterwards, also when the body
    raises, everything is low that was."""
    maps: list[Any] = [module for part in parallel.parts for module in part.modules() if _has_product(module)]
    products = [module.product for module in maps]
    try:
        for module in maps:
            module.product = None
        yield
    finally:
        for module, product in zip(maps, products):
            module.product = product


def _has_product(module: nn.Module) -> bool:
    return isinstance(module, Linear | Experts) and module.product is not None


def _own_maps(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Linear maps that are attributes of the module itself."""
    return ((name, child) for name, child in module.named_children() if isinstance(child, Linear))


def _place(
    holder: nn.Module, name: str, parameter: str, split: Split | None, parallel: Parallel, context: Context
) -> Place:
    axes, region = parallel.groups.axes, parallel.places[parameter].region
    on_shards = isinstance(holder, LatentAttention) and name in ("q_a", "kv_a")
    balanced = context.parts_per_rank == 2
    tokens = split_tokens(axes.cp, axes.tp if on_shards else None, balanced=balanced)
    shares = None
    if isinstance(holder, Attention) and name in ("k", "v") and holder.kv_heads is not None:
        shares = axes.tp  # every rank computes all heads, for scales are of the whole weight, and uses some
        holder.k.rows = holder.v.rows = None
    (outputs, inputs), (first, start) = region.shape, region.start
    return Place(
        parameter,
        (outputs, inputs),
        start=(first, start),
        tokens=tokens,
        outputs=axes.tp if split is not None and split.dim == 0 else None,
        inputs=axes.tp if split is not None and split.dim == 1 else None,
        shares=shares,
    )


def _lower_experts(experts: Experts, section: LowPrecision, name: str) -> None:
    product = LowPrecisionExperts(section)
    for parameter in (experts.gate, experts.down):
        _, outputs, inputs = parameter.shape
        product.check(name, (outputs, inputs))
    experts.product = product
