"""Kernels that give the same bits every time are asked for where there are others, and only there."""

import pytest
import torch

from truestep.numerics.repeatable import repeatable

ON_CUDA = {"cpu": False, "cuda": True}


@pytest.mark.parametrize("kind", ON_CUDA)
def test_inside_torch_is_asked_for_them(kind, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(ZeroDivisionError), repeatable(torch.device(kind)):
        assert torch.are_deterministic_algorithms_enabled() == ON_CUDA[kind]
        assert torch.utils.deterministic.fill_uninitialized_memory == (filled and not ON_CUDA[kind])
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled
