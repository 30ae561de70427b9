"""Clipping by the global gradient norm.

Order of a step: unscale (fp16), norm, finite check, clip. The norm is finite only if every gradient is, so checking
it is checking them all; it is the same on all ranks, so they decide alike.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / norm), in (0, 1]. 1 as well where there is nothing to clip by: max_norm 0 (switched off), or a
    norm that is no norm (NaN, infinite, a negative mark): such a step is to be skipped, and nothing is turned round."""
    if max_norm == 0:
        return torch.ones_like(norm)
    usable = torch.isfinite(norm) & (norm >= 0)
    return torch.where(usable, max_norm / norm.clamp(min=max_norm), torch.ones_like(norm))


def clip_(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Scale this rank's gradients, plain tensors, in place so that the norm of all, which is `norm` now, is at most
    `max_norm`. Returns the coefficient. On CUDA without host synchronisation."""
    coefficient = clip_coefficient(norm, max_norm)
    if grads and not (coefficient.device.type == "cpu" and coefficient == 1):
        scale_(grads, coefficient)
    return coefficient


def scale_(grads: Sequence[torch.Tensor], by: torch.Tensor) -> None:
    """Multiply gradients of one device in place by a scalar tensor."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        by_dtype[grad.dtype].append(grad)
    for dtype, tensors in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)
        torch._foreach_mul_(tensors, by.to(wide))  # pyright: ignore[reportPrivateImportUsage]
