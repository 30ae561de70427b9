"""Verdicts by raw bits: a strict majority names, nothing else does (C51, C53)."""

import math
import struct

import pytest
import torch

from truestep.sentinel.verdict import judge, vote
from truestep.train.recheck import Bits


def of_bits(pattern: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", pattern))[0]


def bits(loss: float) -> int:
    """What a rank says of a microbatch of this loss."""
    return Bits(torch.tensor([loss], dtype=torch.float64).view(torch.int64), []).digest


def test_c51_the_same_nan_every_time_is_repeatable_and_no_odd_one():
    found = judge({rank: [bits(math.nan)] for rank in range(3)})
    assert found.agreed and found.repeatable and not found.odd


def test_c51_a_number_and_then_nan_is_not_repeatable():
    found = judge({0: [bits(1.0), bits(math.nan)]})
    assert not found.agreed and not found.repeatable
    assert found.named and found.odd == (0,)  # it contradicts itself: nobody else is needed


def test_c51_zeros_of_either_sign_and_nans_of_other_bits_differ():
    assert not vote([bits(0.0), bits(-0.0)]).agreed
    assert not vote([bits(math.nan), bits(of_bits(0x7FF8000000000001))]).agreed


def test_c51_the_odd_one_out_of_three_is_the_third():
    found = vote([bits(x) for x in (1.0, 1.0, 1.0000001)])
    assert found.named and found.odd == (2,) and found.right == bits(1.0)


@pytest.mark.parametrize(
    ("hashes", "named", "odd"),
    [("AABA", True, (2,)), ("AB", False, (0, 1)), ("AABB", False, (0, 1, 2, 3)), ("BAAA", True, (0,)),
     ("ABC", False, (0, 1, 2)), ("AABC", False, (0, 1, 2, 3)), ("AAABC", True, (3, 4)),
     ("AABCD", False, (0, 1, 2, 3, 4))],
)  # fmt: skip
def test_c53_only_a_strict_majority_names(hashes, named, odd):
    found = vote(hashes)
    assert (found.agreed, found.named, found.odd) == (False, named, odd)
    assert (found.right is not None) == named


@pytest.mark.parametrize("hashes", ["A", "AA", "AAAA", ""])
def test_who_agrees_is_not_accused(hashes):
    assert vote(hashes).agreed and vote(hashes).odd == ()


@pytest.mark.parametrize(
    ("said", "named", "odd", "repeatable"),
    [
        ({0: "XA", 1: "AA", 2: "A"}, True, (0,), False),  # wrong once, and right the second time
        ({0: "XX", 1: "AA", 2: "A"}, True, (0,), True),  # always wrong
        ({0: "XY", 1: "AA", 2: "A"}, True, (0,), False),  # wrong in ever new ways
        ({0: "AA", 1: "XA", 2: "A"}, True, (1,), False),  # the one that looked over another's shoulder is wrong
        ({0: "AA", 1: "AA", 2: "X"}, True, (2,), True),
        ({0: "AA", 1: "BB"}, False, (0, 1), True),  # two that insist: nobody can say
        ({0: "XA", 1: "AA"}, True, (0,), False),
        ({0: "XY", 1: "AA"}, True, (0,), False),
        ({0: "XA", 1: "YA", 2: "ZA"}, False, (0, 1, 2), False),  # nothing here repeats itself: software
        ({0: "XX", 1: "YY", 2: "A"}, False, (0, 1, 2), True),
    ],
)
def test_computations_that_were_repeated(said, named, odd, repeatable):
    found = judge(said)
    assert (found.agreed, found.named, found.odd, found.repeatable) == (False, named, odd, repeatable)
