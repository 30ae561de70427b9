"""Global gradient norm and clipping, for plain tensors and DTensors of any placements.

Order of a step: unscale (fp16), norm, finite check, clip. The norm is finite only if every gradient is, so checking
it is checking them all; it is the same on all ranks that hold a shard, so they decide alike.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from truestep.numerics.norm import sum_of_squares


def gradients(params: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients there are; a DTensor stays one."""
    return [param.grad for param in params if param.grad is not None]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def grad_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm over all elements of the model, each counted once whatever the layout: shards are summed over the
    mesh dimensions that shard them, replicas are not, pending sums are reduced first. Scalar float64 on the device of
    the gradients, without host synchronisation; gradients of less than fp32 are summed in fp32. A collective where a
    gradient is sharded. No gradients: 0 on the CPU."""
    parts: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        parts[_summed_over(grad)].append(local(_reduced(grad)))
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([_sum_over(sum_of_squares(tensors), *key) for key, tensors in parts.items()]).sum().sqrt()


def _reduced(grad: torch.Tensor) -> torch.Tensor:
    if isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements):
        return grad.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in grad.placements])
    return grad


def _summed_over(grad: torch.Tensor) -> tuple:
    """(mesh, its dimensions that shard the tensor); () for a tensor that is whole here."""
    if not isinstance(grad, DTensor):
        return ()
    dims = [dim for dim, p in enumerate(grad.placements) if not isinstance(p, Replicate | Partial)]
    return (grad.device_mesh, tuple(dims)) if dims else ()


def _sum_over(square: torch.Tensor, mesh: DeviceMesh | None = None, dims: tuple[int, ...] = ()) -> torch.Tensor:
    if mesh is not None:
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
    return square


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / norm), in (0, 1]. 1 as well where there is nothing to clip by: max_norm 0 (switched off), or a
    norm that is no norm (NaN, infinite, a negative mark): such a step is to be skipped, and nothing is turned round."""
    if max_norm == 0:
        return torch.ones_like(norm)
    usable = torch.isfinite(norm) & (norm >= 0)
    return torch.where(usable, max_norm / norm.clamp(min=max_norm), torch.ones_like(norm))


def clip_(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Scale the gradients in place so that their norm, which is `norm` now, is at most `max_norm`. Returns the
    coefficient. On CUDA without host synchronisation."""
    coefficient = clip_coefficient(norm, max_norm)
    if grads and not (coefficient.device.type == "cpu" and coefficient == 1):
        scale_(grads, coefficient)
    return coefficient


def scale_(grads: Sequence[torch.Tensor], by: torch.Tensor) -> None:
    """Multiply gradients of one device in place by a scalar tensor."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        by_dtype[grad.dtype].append(local(grad))
    for dtype, tensors in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)
        torch._foreach_mul_(tensors, by.to(wide))  # pyright: ignore[reportPrivateImportUsage]
