"""An injector put into a model that was made parallel: hooks only where its plan strikes."""

from functools import partial
from typing import Any

import torch
from torch import nn

from truestep.sentinel.inject import Injector
from truestep.train.state import TrainState


def place_injector(injector: Injector, state: TrainState) -> None:
    """Let gradients, activations and what collectives deliver pass by the injector. The rest of its places are where
    train.integrity looks."""
    parallel = state.parallel
    if injector.wants("gradient"):
        injector.aim("gradient", sorted(parallel.named_parameters()))
        parallel.probe.strike = partial(_strike, injector, "gradient")
    if injector.wants("collective"):
        injector.aim("collective", ["collective"])
        parallel.wire.strike = lambda x: injector.strike("collective", "collective", lambda: x)
        if state.exact is not None:
            state.exact.scales.trail.strike = parallel.wire.strike
    if injector.wants("activation"):
        blocks = {f"blocks.{name}": block for part in parallel.parts for name, block in _blocks(part)}
        injector.aim("activation", list(blocks))
        for name, block in blocks.items():
            block.register_forward_hook(partial(_struck_output, injector, parallel, name))


def _strike(injector: Injector, site: str, name: str, tensor: torch.Tensor, microbatch: int | None) -> None:
    injector.strike(site, name, lambda: tensor, microbatch)


def _struck_output(injector: Injector, parallel: Any, name: str, block: nn.Module, given: Any, out: Any) -> None:
    first = out if isinstance(out, torch.Tensor) else out[0]
    injector.strike("activation", name, lambda: first, parallel.probe.microbatch)


def _blocks(part: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(part.blocks.named_children())  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
