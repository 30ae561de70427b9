"""Precision is decided once, by measurement, and weights of less than fp32 are not trained."""

import dataclasses

import pytest
import torch

from truestep.errors import UserError
from truestep.numerics.precision import Precision, require_master, resolve_precision
from truestep.numerics.roles import Role
from truestep.optim.build import build_optimizer
from truestep.recipe.stage import Optim


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16", "float64"])
def test_what_is_asked_for_is_taken_without_measuring(asked):
    found = resolve_precision(asked, torch.device("cpu"), None)
    assert found.chosen == asked and found.measured == {} and found.dtype == getattr(torch, asked)


def test_auto_on_a_cpu_says_why():
    found = resolve_precision("auto", torch.device("cpu"), lambda: {"float32": 2.0, "bfloat16": 1.0})
    assert found.measured == {"float32": 2.0, "bfloat16": 1.0} and "0.50 times as long" in found.reason
    assert Precision(**dataclasses.asdict(found)) == found  # travels and is recorded as plain values
    assert resolve_precision("auto", torch.device("cpu"), None).chosen == "float32"


@pytest.mark.parametrize(
    "fp32, bf16, chosen", [(2.0, 1.0, "bfloat16"), (1.0, 1.0, "float32"), (1.0, 7.0, "float32"), (1.0, 0.95, "float32")]
)
def test_auto_follows_the_measurement(fp32, bf16, chosen):
    found = resolve_precision("auto", torch.device("cpu"), lambda: {"float32": fp32, "bfloat16": bf16})
    assert found.chosen == chosen


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.float64, 1e-6)])  # 100 roundings of 2^-25
def test_c25_masters_keep_updates_that_bfloat16_would_lose(dtype, tolerance):
    pure = torch.ones((), dtype=torch.bfloat16)
    for _ in range(100):
        pure -= 0.001
    assert pure.item() == 1.0  # the fault

    # Steps of our kind: bfloat16 forward from a wider master. Without memory AdamW moves by the rate exactly.
    name, master = "w", torch.nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = build_optimizer([(name, master)], {name: Role.BIAS}, Optim(lr=0.001, betas=(0.0, 0.0)))
    for _ in range(100):
        torch.nn.functional.linear(torch.ones(1, 1).bfloat16(), master[None].bfloat16()).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert master.item() == pytest.approx(0.9, abs=tolerance)
    assert master.detach().bfloat16().item() == 0.8984375


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c25_weights_without_a_master_are_refused(dtype):
    name, param = "blocks.0.weight", torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))
    with pytest.raises(UserError, match=r"'blocks.0.weight' is .*float16.*keep it in float32") as error:
        build_optimizer([(name, param)], {name: Role.MATRIX}, Optim())
    assert "\n" not in str(error.value)
    require_master([(name, param.requires_grad_(False))])  # frozen weights may have any dtype
