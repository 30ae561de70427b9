"""Calibration: block after block, each on what the quantised blocks before it make of the calibration data."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from truestep.numerics.batch import Batch
from truestep.quant.gptq import Seen

Settle = Callable[[str, Seen], None]
"""Called with a map's name once its inputs were seen: quantises its weight and puts the values in the place of it."""


@dataclass
class _Call:
    """What a block is called with for one batch, `x` first. `real_BT` tells tokens from padding."""

    x_BTD: torch.Tensor
    rest: tuple[Any, ...]
    real_BT: torch.Tensor


@torch.no_grad()
def calibrate(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    batches: Sequence[Batch],
    maps: Mapping[str, nn.Linear],
    products: bool,
    settle: Settle,
) -> None:
    """Show every map of `maps` (by its name in the model) its inputs, then settle it, in the order of calls.

    Maps that are called with the very same input are settled together; whatever comes after them in the model sees
    the values that they were settled to. `products`: see Seen."""
    model.eval()
    calls = _first_calls(model, [block for _, block in blocks], batches)
    for number, (prefix, block) in enumerate(blocks):
        own = {name: one for name, one in maps.items() if name.startswith(f"{prefix}.")}
        for group in _groups(block, own, calls[number]):
            seen = _look(block, {name: own[name] for name in group}, calls[number], products)
            for name in group:
                settle(name, seen[name])
        if number + 1 < len(blocks):
            for now, later in zip(calls[number], calls[number + 1]):
                later.x_BTD = block(now.x_BTD, *now.rest)
        calls[number] = []


def _first_calls(model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Batch]) -> list[list[_Call]]:
    """For each block its calls; what comes out of unquantised blocks is not kept."""
    calls: list[list[_Call]] = [[] for _ in blocks]
    device = next(model.parameters()).device
    for batch in batches:
        real_BT = torch.ones_like(batch.tokens_BT, dtype=torch.bool)
        if batch.documents_BT is not None:
            real_BT = batch.documents_BT >= 0
        real_BT = real_BT.to(device)
        batch = batch.to(device)
        with ExitStack() as hooks:
            for number, block in enumerate(blocks):
                note = partial(_note, calls[number], real_BT, number == 0)
                hooks.callback(block.register_forward_pre_hook(note).remove)
            model(batch.tokens_BT, batch.positions_BT, batch.documents_BT, lambda out: out)
    return calls


def _note(calls: list[_Call], real_BT: torch.Tensor, first: bool, module: nn.Module, args: tuple[Any, ...]) -> None:
    calls.append(_Call(args[0] if first else args[0].new_empty(0), args[1:], real_BT))


def _groups(block: nn.Module, maps: Mapping[str, nn.Linear], calls: Sequence[_Call]) -> list[list[str]]:
    """Names of maps in the order of their calls, those with the same input together."""
    groups: list[tuple[torch.Tensor, list[str]]] = []

    def note(name: str, x: torch.Tensor) -> None:
        for other, names in groups:
            if other is x:
                names.append(name)
                return
        groups.append((x, [name]))

    _run(block, maps, calls[:1], lambda name, x, call: note(name, x))
    return [names for _, names in groups]


def _look(block: nn.Module, maps: Mapping[str, nn.Linear], calls: Sequence[_Call], products: bool) -> dict[str, Seen]:
    """Maps of one input share what was seen of it."""
    first = next(iter(maps))
    seen = Seen(maps[first].in_features, products, maps[first].weight.device)
    _run(block, {first: maps[first]}, calls, lambda name, x, call: seen.add(x[call.real_BT]))
    return dict.fromkeys(maps, seen)


def _run(
    block: nn.Module,
    maps: Mapping[str, nn.Linear],
    calls: Sequence[_Call],
    look: Callable[[str, torch.Tensor, _Call], None],
) -> None:
    for call in calls:
        with ExitStack() as hooks:
            for name, module in maps.items():
                hooks.callback(module.register_forward_pre_hook(partial(_shown, look, name, call)).remove)
            block(call.x_BTD, *call.rest)


def _shown(
    look: Callable[[str, torch.Tensor, _Call], None], name: str, call: _Call, module: nn.Module, args: tuple[Any, ...]
) -> None:
    look(name, args[0], call)
