"""What a rank holds of the state, as it lies in memory: for digests, and for faults that are put in on purpose."""

from dataclasses import replace

import torch

from truestep.models.decoder import Decoder
from truestep.numerics.axis import Axis
from truestep.numerics.pieces import Piece, piece_of
from truestep.parallel.replica import copying_axes
from truestep.train.state import TrainState

_ROUTERS = ("bias", "load")
"""Buffers of routers that are the same on all ranks of a pipeline stage."""


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in state.parallel.locals().items()}


def optimizer(state: TrainState) -> dict[str, torch.Tensor]:
    states = state.optimizer.state_by_param()
    return {f"{name}.{key}": piece_of(x).local for name, kept in states.items() for key, x in kept.items()}


def gradients(state: TrainState) -> dict[str, torch.Tensor]:
    """Complete ones, as the optimizer takes them."""
    return {name: p.grad for name, p in state.parallel.locals().items() if p.grad is not None}


def memory(state: TrainState) -> dict[str, torch.Tensor]:
    """All that nothing changes between two steps, copies included, by the names that a checkpoint has."""
    model = weights(state) | _buffers(state)
    exact = state.exact.state_tensors() if state.exact is not None else {}
    return _prefixed("model", model) | _prefixed("optim", optimizer(state)) | exact


def copies(state: TrainState) -> tuple[dict[str, Piece], dict[str, list[Axis]]]:
    """Pieces of weights, of optimizer state and of routers' buffers that other ranks hold too, and the axes along which
    those lie."""
    parallel, states = state.parallel, state.optimizer.state_by_param()
    named = parallel.named_parameters()
    pieces: dict[str, Piece] = {}
    axes: dict[str, list[Axis]] = {}
    for name, along in copying_axes(parallel).items():
        if not along:
            continue
        piece = parallel.places[name].piece(named[name])
        pieces[f"model.{name}"], axes[f"model.{name}"] = piece, along
        for key, value in states.get(name, {}).items():
            local = piece_of(value).local
            if local.shape == piece.local.shape:
                kept = f"optim.{name}.{key}"
                pieces[kept], axes[kept] = replace(piece, local=local), along
    if parallel.groups.stage.size > 1:
        for name, buffer in _buffers(state).items():
            if name.rpartition(".")[2] in _ROUTERS:
                pieces[f"model.{name}"], axes[f"model.{name}"] = piece_of(buffer), [parallel.groups.stage]
    return pieces, axes


def _buffers(state: TrainState) -> dict[str, torch.Tensor]:
    """Of our own models, whose buffers change within steps alone."""
    parts = [part for part in state.parallel.parts if isinstance(part, Decoder)]
    return {name: buffer for part in parts for name, buffer in part.named_buffers()}


def _prefixed(prefix: str, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in named.items()}
