"""Products of known bits and memory that keeps patterns: a sound device passes, one wrong bit does not."""

import time

import pytest
import torch

from truestep.sentinel.host import DTYPES, LONG, SHORT, check_device
from truestep.sentinel.inject import flip_bit_

CPU = torch.device("cpu")


def test_a_sound_device_passes_and_takes_little_time():
    assert check_device(CPU, SHORT["cpu"]) == ""
    began = time.process_time()
    assert check_device(CPU, LONG["cpu"]) == ""
    assert time.process_time() - began < 2.0  # some 0.1 s where nothing else runs


@pytest.mark.parametrize("what", [*(f"product {dtype}" for dtype in DTYPES), "memory", "pattern"])
def test_one_wrong_bit_is_found(what):
    def strike(where: str, tensor: torch.Tensor) -> None:
        if where == what:
            flip_bit_(tensor, 4321, 9)  # of every format a bit of the mantissa

    sentence = check_device(CPU, SHORT["cpu"], strike)
    kind = what.rpartition(".")[2] if "product" in what else "memory"
    assert kind in sentence and ("1 of" in sentence or "4 of" in sentence)


def test_a_zero_of_the_other_sign_is_no_fault_of_a_product():
    """Which of the two an empty sum gives depends on the kernel."""
    sentence = check_device(CPU, SHORT["cpu"], lambda where, x: x.add_(-0.0) if "product" in where else None)
    assert sentence == ""
