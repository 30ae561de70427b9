"""Every trainable parameter is in exactly one group, by role and shape."""

import pytest
import torch

from truestep.errors import UserError
from truestep.numerics.roles import Role
from truestep.optim.build import build_optimizer
from truestep.optim.groups import describe, param_groups
from truestep.recipe.stage import Optim

ROLES = {
    "ln_f.scale": Role.NORM,
    "q_norm.weight": Role.NORM,
    "fc.weight": Role.MATRIX,
    "fc.bias": Role.BIAS,
    "wte.weight": Role.EMBEDDING,
    "conv.weight": Role.OTHER,
    "head.weight": Role.HEAD,
}
SHAPES = {"fc.weight": (3, 2), "wte.weight": (4, 2), "head.weight": (4, 2), "conv.weight": (2, 2, 2)}


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(torch.ones(SHAPES.get(name, (3,)), dtype=torch.float64))) for name in ROLES]


def members(section: Optim, named) -> dict[str, list[str]]:
    return {group.name: [name for name, _ in group.params] for group in param_groups(named, ROLES, section)}


def test_c22_decay_goes_by_role_and_shape():
    named = parameters()
    optimizer = build_optimizer(named, ROLES, Optim(lr=0.1, weight_decay=0.1))
    for _, param in named:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    decayed = {"fc.weight", "conv.weight", "head.weight"}
    for name, param in named:
        expected = torch.full_like(param, 0.99 if name in decayed else 1.0)
        torch.testing.assert_close(param.data, expected, rtol=0, atol=1e-15)


def test_c22_every_parameter_is_in_exactly_one_group_and_a_tied_one_once():
    named = parameters()
    tied = [*named, ("tied.weight", dict(named)["wte.weight"])]
    for kind in ("adamw", "muon"):
        names = [name for some in members(Optim(kind=kind), tied).values() for name in some]
        assert sorted(names) == sorted(ROLES)


def test_c22_the_embedding_follows_the_stated_policy():
    assert "wte.weight" in members(Optim(), parameters())["no decay"]
    assert "wte.weight" in members(Optim(decay_embeddings=True), parameters())["decay"]


def test_muon_takes_the_matrices_and_adamw_the_rest():
    groups = members(Optim(kind="muon"), parameters())
    assert groups["muon"] == ["fc.weight"]
    assert groups["decay"] == ["conv.weight", "head.weight"]


def test_muon_takes_stacks_of_matrices_too():
    named = [
        ("experts.gate", torch.nn.Parameter(torch.ones(2, 3, 4))),
        ("kernel", torch.nn.Parameter(torch.ones(2, 2, 2))),
    ]
    roles = {"experts.gate": Role.MATRIX, "kernel": Role.OTHER}
    groups = param_groups(named, roles, Optim(kind="muon"))
    assert [(group.name, *dict(group.params)) for group in groups] == [
        ("muon", "experts.gate"),
        ("decay", "kernel"),
    ]


def test_frozen_parameters_are_left_out():
    named = parameters()
    dict(named)["fc.weight"].requires_grad_(False)
    assert all("fc.weight" not in names for names in members(Optim(), named).values())


def test_groups_can_be_printed():
    rows = describe(param_groups(parameters(), ROLES, Optim(kind="muon", weight_decay=0.2)))
    assert [row["group"] for row in rows] == ["muon", "decay", "no decay"]
    assert rows[0]["lr"] == 0.02 and rows[0]["tensors"] == 1 and rows[0]["elements"] == 6
    assert [row["weight_decay"] for row in rows] == [0.2, 0.2, 0.0]


def test_a_parameter_without_a_role_is_named():
    with pytest.raises(UserError, match=r"'extra\.weight' has no role"):
        param_groups([*parameters(), ("extra.weight", torch.nn.Parameter(torch.ones(2)))], ROLES, Optim())
