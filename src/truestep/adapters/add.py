"""Adapters put beside a model's weights, which are frozen; and their first values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import nn

from truestep.adapters.targets import chosen
from truestep.errors import UserError
from truestep.numerics.counter import init_shard
from truestep.numerics.low_rank import LowRank, Site, is_adapter
from truestep.numerics.pieces import Piece
from truestep.recipe.posttrain import Lora

DEFAULT = "default"
"""Name of the adapter that a stage trains."""

_ALONE = "score."
"""Begins the names of what is trained whole beside adapters: a head that starts from nothing."""


@dataclass(frozen=True)
class Shape:
    """Of the adapter of one weight: `scale` is what B A is multiplied by."""

    rank: int
    scale: float


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    """alpha / r (arXiv 2106.09685, section 4.1), rank-stabilised alpha / sqrt(r) (arXiv 2312.03732)."""
    return alpha / sqrt(rank) if rslora else alpha / rank


def add_adapters(model: nn.Module, sites: Sequence[Site], lora: Lora, name: str = DEFAULT) -> list[Site]:
    """Freeze a model on the meta device, but for a head of scores, and give the weights that `lora.targets` names an
    adapter; these are returned. `sites`: those of the model. UserError for targets that are not there."""
    targets = chosen(sites, lora.targets)
    if lora.dropout and (stacked := [site.weight for site in targets if site.kind == "experts"]):
        raise UserError(
            f"lora.dropout is {lora.dropout:g}, but {stacked[0]} and other experts get their rows sorted, which no "
            f"draw by place follows; set it to 0, or leave experts out of lora.targets."
        )
    shape = Shape(lora.rank, scale_of(lora.rank, lora.alpha, lora.rslora))
    freeze(model)
    put(targets, name, dict.fromkeys((site.path for site in targets), shape))
    return targets


def freeze(model: nn.Module) -> None:
    """All parameters but those of a head of scores."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(_ALONE))


def put(sites: Iterable[Site], name: str, shapes: Mapping[str, Shape], device: str = "meta") -> None:
    """Give sites an adapter, without values; `shapes` by the sites' paths. UserError for a name that cannot be one."""
    if not name.isidentifier() or hasattr(nn.ModuleDict, name) or name in ("factors", "on", "dropout", "training"):
        raise UserError(f"{name!r} cannot be the name of an adapter; choose a word of letters, digits and _.")
    for site in sites:
        shape = shapes[site.path]
        with torch.device(device):
            adapter = LowRank(shape.rank, site.inputs, site.outputs, shape.scale, site.experts)
        site.adapt().put(name, adapter)


@torch.no_grad()
def first_values(pieces: Mapping[str, Piece], tables: Iterable[str], seed: int) -> None:
    """Fill the adapters among `pieces`: the product is 0, so the model is the one that was there. A starts normal with
    the variance 1 / 3 I of PEFT's, B at 0; beside tables of tokens (`tables`: paths of their adapters) A at 0 and B
    normal, so that a token that never comes stays as it is. The same on every mesh."""
    looked_up = tuple(f"{path}." for path in tables)
    for name, piece in pieces.items():
        if not is_adapter(name):
            continue
        of_table, is_a = name.startswith(looked_up) if looked_up else False, name.endswith(".a")
        if is_a == of_table:
            piece.local.zero_()
        else:
            std = 1.0 if of_table else (3 * piece.shape[-1]) ** -0.5
            values = init_shard(name, seed, piece.shape, piece.region, std, device=piece.local.device)
            piece.local.copy_(values)
