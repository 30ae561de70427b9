"""Kernels that give the same bits every time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Inside, operations on a CUDA device take kernels that add in a fixed order (by default the backward passes of
    attention do not); one that has none warns. CPU kernels are so anyhow."""
    if device.type != "cuda":
        yield
        return
    # cuBLAS promises repeatable products for fixed workspaces alone; torch warns of every product without this
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic  # its properties are set on the module
    before = torch.get_deterministic_debug_mode()
    filled, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False  # nobody reads it
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        settings.fill_uninitialized_memory = filled
