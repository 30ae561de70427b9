"""From the recipe's [model] to a module without memory, and from a seed to its first weights."""

import re
from collections.abc import Mapping

import torch
from torch import nn

from truestep.models.decoder import Decoder
from truestep.models.foreign import ForeignModel, build_foreign, init_foreign
from truestep.models.roles import SCORE
from truestep.numerics.counter import init_shard
from truestep.numerics.pieces import Piece, pieces_of
from truestep.numerics.roles import Role
from truestep.recipe.model import ModelSection

_RESIDUAL = re.compile(r"\.(attention\.out|down)(\.weight)?$")
"""Projections into the residual stream: of attention, of an MLP, of one expert or of all experts in one tensor."""


def build_model(section: ModelSection, vocab_size: int) -> Decoder | ForeignModel:
    """The model on the meta device: shard it, `to_empty` it on its device, fill it by `init_weights` or `load_hf`.

    A user's own module has real memory instead, since not every constructor bears the meta device."""
    section = section.resolved(vocab_size)
    if section.module is not None:
        return build_foreign(section)
    with torch.device("meta"):
        return Decoder(section)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, pieces: Mapping[str, Piece] | None = None) -> None:
    """Fill every parameter in place: normal(0, init_std), with init_std / sqrt(2 num_layers) for projections back into
    the residual stream; norms start at scale 1, biases, buffers that persist and the score head at 0.

    `pieces`: what this rank holds, by the names that parameters and buffers have in the whole model; by default all of
    `model`, whole or sharded by FSDP2. Element i of a parameter depends on (seed, name, i) alone, so the weights are
    the same on every mesh and device. A user's own module is initialised by itself, from the seed."""
    if isinstance(model, ForeignModel):
        return init_foreign(model, seed, pieces or {})
    assert isinstance(model, Decoder)
    if pieces is None:
        pieces = pieces_of(model.state_dict(keep_vars=True))
    roles, section = model.roles(), model.section
    buffers = {name for name, _ in model.named_buffers()}
    for name, piece in pieces.items():
        local, role = piece.local, roles.get(name)
        if role == Role.NORM:
            local.fill_(0.0 if section.norm_offset else 1.0)
        elif role == Role.BIAS or name in buffers or name == SCORE:
            local.zero_()
        else:
            depth = 2 * section.num_layers if _RESIDUAL.search(name) else 1
            std = section.init_std / depth**0.5
            local.copy_(init_shard(name, seed, piece.shape, piece.region, std, device=local.device))
