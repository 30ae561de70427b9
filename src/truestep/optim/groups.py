"""Which optimizer and which decay a parameter gets: by its role and shape, never by its name.

Decayed: matrices and untied heads, other parameters of two or more dimensions, and the embedding table if the recipe
says so. Never decayed: norms, biases, everything with fewer than two dimensions. A table tied to the head is an
embedding.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from truestep.errors import UserError
from truestep.numerics.roles import Role
from truestep.recipe.stage import Optim

Named = tuple[str, torch.nn.Parameter]


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike. `lr` is the peak rate."""

    name: str
    method: str
    lr: float
    weight_decay: float
    params: list[Named]


def param_groups(named_params: Iterable[Named], roles: Mapping[str, Role], section: Optim) -> list[Group]:
    """Every trainable parameter in exactly one group; a tied one, which has several names, once under its first name.
    Groups without parameters are left out. Raises UserError for a parameter without a role."""
    groups = {
        "muon": Group("muon", "muon", section.muon_lr, section.weight_decay, []),
        "decay": Group("decay", "adamw", section.lr, section.weight_decay, []),
        "no decay": Group("no decay", "adamw", section.lr, 0.0, []),
    }
    seen: set[int] = set()
    for name, param in named_params:
        if not param.requires_grad or id(param) in seen:
            continue
        seen.add(id(param))
        if name not in roles:
            raise UserError(f"parameter {name!r} has no role; name it in the model's roles().")
        groups[_group_of(roles[name], param, section)].params.append((name, param))
    return [group for group in groups.values() if group.params]


def _group_of(role: Role, param: torch.Tensor, section: Optim) -> str:
    if section.kind == "muon" and role is Role.MATRIX and param.ndim in (2, 3):
        return "muon"
    if param.ndim < 2 or role in (Role.NORM, Role.BIAS):
        return "no decay"
    if role is Role.EMBEDDING and not section.decay_embeddings:
        return "no decay"
    return "decay"


def describe(groups: Iterable[Group]) -> list[dict[str, str | int | float | list[str]]]:
    """A row a group, for printing at the start and for the run log."""
    return [
        {
            "group": group.name,
            "method": group.method,
            "lr": group.lr,
            "weight_decay": group.weight_decay,
            "tensors": len(group.params),
            "elements": sum(param.numel() for _, param in group.params),
            "names": [name for name, _ in group.params],
        }
        for group in groups
    ]
