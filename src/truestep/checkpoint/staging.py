"""Copies of what a rank holds, so that training can go on while they are written."""

from collections.abc import Mapping

import numpy as np
import torch


def host_bytes(count: int) -> torch.Tensor:
    """Uninitialised host memory. NumPy asks for huge pages, which makes the first touch about twice as quick."""
    return torch.from_numpy(np.empty(count, dtype=np.uint8))


def _host_like(local: torch.Tensor) -> torch.Tensor:
    """A contiguous host buffer for a copy: pinned if it comes from a GPU."""
    on_gpu = local.device.type == "cuda"
    if on_gpu or not local.numel():
        return torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=on_gpu)
    return host_bytes(local.numel() * local.itemsize).view(local.dtype).reshape(local.shape)


class Stage:
    """Host buffers that are kept from save to save (allocating and touching new ones takes longer than the copy)."""

    def __init__(self):
        self.buffers: dict[str, torch.Tensor] = {}

    def copy(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Contiguous CPU copies of local parts; done when it returns, whatever the caller changes afterwards.

        The next call overwrites them. CUDA tensors are copied to pinned memory, all in flight together.
        """
        devices = set()
        for name in self.buffers.keys() - parts.keys():
            del self.buffers[name]
        for name, local in parts.items():
            buffer = self.buffers.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = self.buffers[name] = _host_like(local)
            buffer.copy_(local, non_blocking=True)
            devices.add(local.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return self.buffers


def as_they_are(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU views or copies, for a caller that waits until they are written."""
    return {name: local.contiguous().cpu() for name, local in parts.items()}
