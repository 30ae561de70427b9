"""Weights of a decoder that can have low-rank adapters, by what they are for."""

from collections.abc import Iterator, Mapping

from torch import nn

from truestep.models.layers import GatedMLP, Linear
from truestep.models.moe import Experts
from truestep.models.router import Router
from truestep.numerics.low_rank import Group, Site

EXPERT_MAPS = ("gate", "up", "down")


def sites_of_blocks(blocks: Mapping[str, nn.Module]) -> Iterator[Site]:
    """Of every linear map and every stack of experts in blocks, by their numbers. Routers have none."""
    for number, block in blocks.items():
        for inner, module in block.named_modules():
            path = f"blocks.{number}.{inner}"
            if isinstance(module, Experts):
                yield from _of_experts(path, module)
            elif not isinstance(module, Router):
                group = "mlp" if isinstance(module, GatedMLP) else "attention"
                for name, child in module.named_children():
                    if isinstance(child, Linear):
                        yield of_map(f"{path}.{name}", child, group)


def of_map(path: str, linear: Linear, group: Group) -> Site:
    """The site of a linear map, before its weight is cut."""
    return Site(
        f"{path}.weight", f"{path}.lora", group, "linear", linear.in_features, linear.out_features, linear, "lora"
    )


def of_table(path: str, table: nn.Embedding) -> Site:
    tokens, size = table.num_embeddings, table.embedding_dim
    return Site(f"{path}.weight", f"{path}.lora", "embeddings", "table", tokens, size, table, "lora")


def _of_experts(path: str, experts: Experts) -> Iterator[Site]:
    count, inner, width = experts.sizes
    for name in EXPERT_MAPS:
        inputs, outputs = (inner, width) if name == "down" else (width, inner)
        weight, adapters = f"{path}.{name}", f"{path}.lora.{name}"
        yield Site(weight, adapters, "experts", "experts", inputs, outputs, experts.lora, name, count)
