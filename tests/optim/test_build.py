"""AdamW equals torch's, state is complete and goes by name, and a user's own optimizer trains by import path."""

import copy

import pytest
import torch

from truestep.errors import UserError
from truestep.numerics.roles import Role
from truestep.optim.build import build_optimizer
from truestep.optim.named import NamedOptimizer
from truestep.recipe.stage import Optim

ADAM = Optim(lr=1.0, betas=(0.9, 0.999), eps=1e-300, weight_decay=0.0)


def parameter(name: str, *shape: int) -> tuple[str, torch.nn.Parameter]:
    return name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))


def optimizer_of(*named, section: Optim = ADAM) -> NamedOptimizer:
    return build_optimizer(named, {name: Role.BIAS if p.ndim == 1 else Role.MATRIX for name, p in named}, section)


def move(optimizer: NamedOptimizer, param: torch.nn.Parameter, grad: float) -> float:
    """How far one step with this gradient moves the parameter, in units of the rate."""
    before = param.detach().clone()
    param.grad = torch.full_like(param, grad)
    optimizer.step()
    return (before - param.detach()).flatten()[0].item()


def copied(optimizer: NamedOptimizer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in optimizer.named_state().items()}


def fill(optimizer: NamedOptimizer, saved: dict[str, torch.Tensor]) -> None:
    """As loading a checkpoint does: by name, in place."""
    for name, tensor in optimizer.named_state().items():
        tensor.copy_(saved[name])


def test_equal_to_torch_step_by_step():
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)).double()
    other = copy.deepcopy(model)
    roles = {name: Role.MATRIX if p.ndim == 2 else Role.BIAS for name, p in model.named_parameters()}
    section = Optim(lr=0.01, weight_decay=0.1)
    ours = build_optimizer(model.named_parameters(), roles, section)
    matrices, biases = ([p for p in other.parameters() if p.ndim == n] for n in (2, 1))
    theirs = torch.optim.AdamW(
        [{"params": matrices}, {"params": biases, "weight_decay": 0.0}], 0.01, (0.9, 0.95), 1e-8, 0.1
    )
    for k in range(5):
        x = torch.randn(7, 4, dtype=torch.float64)
        for some in (model, other):
            some(x).square().mean().backward()
        ours.set_lr_factor(1 / (k + 1))
        for group in theirs.param_groups:
            group["lr"] = 0.01 / (k + 1)
        assert ours.lr == pytest.approx(0.01 / (k + 1))
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_c43_state_is_complete_before_the_first_step(kind):
    named = [parameter("a", 3, 2), parameter("b", 3)]
    optimizer = optimizer_of(*named, section=Optim(kind=kind))
    before = copied(optimizer)
    for _, param in named:
        param.grad = torch.ones_like(param)
    optimizer.step()
    after = optimizer.named_state()
    assert before.keys() == after.keys()
    assert {"b.step", "b.exp_avg", "b.exp_avg_sq"} <= before.keys()
    assert all((tensor == 0).all() for tensor in before.values()) and after["b.step"].item() == 1.0
    assert [before[k].shape for k in before] == [after[k].shape for k in before]


def test_c43_resumed_moments_and_step_counts_go_on():
    name, param = parameter("w", 1)
    optimizer = optimizer_of((name, param))
    for _ in range(10):
        move(optimizer, param, 1.0)
    saved = copied(optimizer)
    for grad, expected in ((-1.0, 0.708535), (1.0, 1.0)):
        again = parameter("w", 1)
        resumed = optimizer_of(again)
        fill(resumed, saved)
        assert move(resumed, again[1], grad) == pytest.approx(expected, abs=1e-6)


def test_c43_state_goes_by_name_not_by_order():
    a, b = parameter("a", 2), parameter("b", 2)
    optimizer = optimizer_of(a, b)
    a[1].grad, b[1].grad = torch.ones(2).double(), -torch.ones(2).double()
    optimizer.step()
    saved = copied(optimizer)
    turned = optimizer_of(parameter("b", 2), parameter("a", 2))
    fill(turned, saved)
    state = turned.named_state()
    assert (state["a.exp_avg"] > 0).all() and (state["b.exp_avg"] < 0).all()


OWN = """
import torch

def momentum(named_params, roles, lr, momentum=0.5):
    return torch.optim.SGD([param for _, param in named_params], lr=lr, momentum=momentum, weight_decay=0.1)

def lazy_adam(named_params, roles, lr):
    return torch.optim.Adamax([param for _, param in named_params], lr=lr)

def forgetful(named_params, roles, lr):
    return torch.optim.SGD([named_params[0][1]], lr=lr)

def not_one(named_params, roles, lr):
    return 3

class Counts(torch.optim.Optimizer):
    def __init__(self, named_params, roles, lr):
        super().__init__([param for _, param in named_params], {"lr": lr})

    def step(self):
        for param in self.param_groups[0]["params"]:
            self.state[param]["count"] = self.state[param].get("count", 0) + 1
"""


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    (tmp_path / "my_own_optimizers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_own_optimizer_trains_and_its_state_is_complete_and_named(own_package):
    named = [parameter("a", 3, 2), parameter("b", 3)]
    for _, param in named:
        param.data.fill_(1.0)
    optimizer = optimizer_of(*named, section=Optim(kind="my_own_optimizers:lazy_adam", lr=0.5))
    state = optimizer.named_state()
    assert {"a.step", "a.exp_avg", "a.exp_inf", "b.step"} <= state.keys()
    assert state["a.step"].item() == 0.0 and (state["a.exp_avg"] == 0).all()
    assert all((param == 1).all() and param.grad is None for _, param in named)
    assert move(optimizer, named[0][1], 1.0) == pytest.approx(0.5) and state["a.step"].item() == 1.0


def test_own_optimizer_takes_options(own_package):
    named = [parameter("a", 3)]
    section = Optim(kind="my_own_optimizers:momentum", lr=1.0, options={"momentum": 0.9})
    optimizer = optimizer_of(*named, section=section)
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["weight_decay"] == 0.1
    assert move(optimizer, named[0][1], 1.0) == 1.0


@pytest.mark.parametrize(
    "section, says",
    [
        (Optim(kind="adam"), "optim.kind 'adam' is unknown"),
        (Optim(options={"beta": 1}), "optim.options (beta) would not be used"),
        (Optim(kind="my_own_optimizers:missing"), "has no 'missing'"),
        (Optim(kind="my_own_optimizers:momentum", options={"colour": 1}), "colour"),
        (Optim(kind="my_own_optimizers:forgetful"), "leaves out 'b'"),
        (Optim(kind="my_own_optimizers:not_one"), "made a int"),
        (Optim(kind="my_own_optimizers:Counts"), "keeps 'count' of 'a' as a int"),
    ],
)
def test_wrong_sections_are_one_sentence(own_package, section, says):
    with pytest.raises(UserError) as error:
        optimizer_of(parameter("a", 3), parameter("b", 3), section=section)
    assert says in str(error.value) and "\n" not in str(error.value)
