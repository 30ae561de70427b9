"""From the recipe's [model] to a module without memory, and from a seed to its first weights."""

import torch
from torch import nn

from truestep.models.decoder import Decoder
from truestep.models.foreign import ForeignModel, build_foreign, init_foreign
from truestep.models.shards import local_region
from truestep.numerics.counter import init_shard
from truestep.numerics.roles import Role
from truestep.recipe.model import ModelSection

_RESIDUAL = (".attention.out.weight", ".mlp.down.weight")


def build_model(section: ModelSection, vocab_size: int) -> Decoder | ForeignModel:
    """The model on the meta device: shard it, `to_empty` it on its device, fill it by `init_weights` or `load_hf`.

    A user's own module has real memory instead, since not every constructor bears the meta device."""
    section = section.resolved(vocab_size)
    if section.module is not None:
        return build_foreign(section)
    with torch.device("meta"):
        return Decoder(section)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter in place, each rank its own shards: normal(0, init_std), with init_std / sqrt(2 num_layers)
    for projections back into the residual stream; norms start at scale 1, biases at 0. Element i of a parameter
    depends on (seed, name, i) alone, so the weights are the same for every sharding and device. A user's own module
    is initialised by itself, from the seed."""
    if isinstance(model, ForeignModel):
        return init_foreign(model, seed)
    assert isinstance(model, Decoder)
    roles, section = model.roles(), model.section
    for name, parameter in model.named_parameters():
        local, region = local_region(parameter)
        if roles[name] == Role.NORM:
            local.fill_(0.0 if section.norm_offset else 1.0)
        elif roles[name] == Role.BIAS:
            local.zero_()
        else:
            std = section.init_std / (2 * section.num_layers) ** 0.5 if name.endswith(_RESIDUAL) else section.init_std
            local.copy_(init_shard(name, seed, parameter.shape, region, std, device=local.device))
