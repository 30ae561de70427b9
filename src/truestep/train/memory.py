"""What the first steps of an attempt take of memory. Later ones take no more, but for rows of other lengths."""

from dataclasses import dataclass

import torch

from truestep.parallel.job import Job
from truestep.parallel.model import Parallel

FIRST_STEPS = 3
"""The first step makes the optimizer's state, so that its own peak lies lower than that of the next."""


@dataclass(frozen=True)
class MemoryUse:
    """On the rank with most of it. `kept_bytes`: by autograd, of one microbatch, from its forward to its backward pass.
    `peak_bytes`: the largest sum of the device's allocations; None on a CPU."""

    kept_bytes: int
    peak_bytes: int | None


class MemoryWatch:
    """Measures from now on, once."""

    def __init__(self, parallel: Parallel, job: Job):
        self._parallel, self._job = parallel, job
        self._left = FIRST_STEPS
        if parallel.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(parallel.device)

    def after_step(self, *, last: bool) -> MemoryUse | None:
        """To be called after every step by all ranks together; what was found once `FIRST_STEPS` are done, or before
        that after the `last` one."""
        self._left -= 1
        if self._left != 0 and not (last and self._left > 0):
            return None
        self._left = 0
        on_gpu, device = self._parallel.device.type == "cuda", self._parallel.device
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
        kept, peak = self._job.all_max([float(self._parallel.kept.total), float(peak)])
        return MemoryUse(int(kept), int(peak) if on_gpu else None)
