"""Faults by plan: which bit, where, when, how often, on whom, also across restarts; and plans that are none."""

import json

import pytest
import torch

from truestep.errors import UserError
from truestep.sentinel.inject import VARIABLE, Flip, Injector, flip_bit_, injector, read_plan

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_every_format_can_be_flipped_and_flipped_back(dtype):
    x = torch.arange(12).to(dtype).view(3, 4).t()  # not contiguous
    width = INTEGERS[x.element_size()]
    for bit in range(8 * x.element_size()):
        y = torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)
        flip_bit_(y, 5, bit)
        changed = x.contiguous().view(width) ^ y.contiguous().view(width)
        assert [i for i, word in enumerate(changed.flatten().tolist()) if word] == [5]
        assert bin(int(changed.flatten()[5]) % 2 ** (8 * x.element_size())).count("1") == 1
        flip_bit_(y, 5 + 12, bit + 8 * x.element_size())
        assert torch.equal(x, y)


def struck(flips, steps=4, rank=1, host="", folder=None, microbatches=2):
    """(step, tensor, microbatch) of each strike."""
    one, found = Injector(flips, rank, host, folder), []
    for step in range(1, steps + 1):
        one.begin(step)
        for microbatch in range(microbatches):
            one.aim("gradient", ["a", "b"])
            for name in ("a", "b"):
                x = torch.zeros(3)
                one.strike("gradient", name, lambda x=x: x, microbatch)
                found += [(step, name, microbatch)] if x.any() else []
    return found


def test_once_or_at_every_occasion():
    assert struck([Flip("gradient", 2, 1, tensor="b")]) == [(2, "b", 0)]
    assert struck([Flip("gradient", 2, 1, tensor=5, microbatch=1)]) == [(2, "b", 1)]
    assert struck([Flip("gradient", 3, tensor="a", sticky=True)]) == [(s, "a", m) for s in (3, 4) for m in (0, 1)]
    assert struck([Flip("gradient", 2, 0)]) == struck([Flip("state", 2, 1)]) == []
    assert struck([Flip("gradient", 2, host="h7")], host="h7") == [(2, "a", 0)]
    assert struck([Flip("gradient", 2, host="h7")], host="h8") == []


def test_what_is_spent_stays_spent_after_a_restart_and_what_sticks_stays_on_its_host(tmp_path):
    once, sticky = [Flip("gradient", 2, 1)], [Flip("gradient", 2, 1, sticky=True)]
    assert struck(once, host="h1", folder=tmp_path / "a") and not struck(once, host="h1", folder=tmp_path / "a")
    assert struck(sticky, host="h1", folder=tmp_path / "b")
    assert not struck(sticky, rank=1, host="h2", folder=tmp_path / "b")  # another host is rank 1 now
    assert struck(sticky, rank=0, host="h1", folder=tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no readable JSON"),
        ("[]", "list named `faults`"),
        ('{"faults": [{"site": "state"}]}', "has `site` and `step`"),
        ('{"faults": [{"site": "state", "step": 1, "bits": 3}]}', "has `site` and `step`"),
        ('{"faults": [{"site": "memory", "step": 1}]}', "write one of state, optimizer"),
        ('{"faults": [{"site": "state", "step": 1, "bit": -1}]}', "bit = -1"),
        ('{"faults": [{"site": "state", "step": "2"}]}', "step = '2'"),
    ],
)
def test_plans_that_are_none(tmp_path, text, words):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"plan\.json") as error:
        read_plan(file)
    assert words in str(error.value)
    assert injector({}, 0, "h") is None


def test_a_plan_is_read_from_where_the_variable_says(tmp_path):
    file = tmp_path / "plan.json"
    flip = {"site": "reduced", "step": 3, "rank": None, "tensor": "x", "sticky": True}
    file.write_text(json.dumps({"faults": [flip]}))
    found = injector({VARIABLE: str(file)}, 2, "h")
    assert found is not None and list(found.flips) == [Flip(**flip)]
    with pytest.raises(UserError, match="absent"):
        injector({VARIABLE: str(tmp_path / "absent.json")}, 0, "h")
