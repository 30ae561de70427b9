"""What is done to gradients once a step, after the last backward pass: sum what is missing, then take the norm."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from truestep.numerics.axis import Axis
from truestep.numerics.norm import sum_of_squares
from truestep.numerics.pieces import Piece

BUCKET_BYTES = 64 << 20


def sum_missing(grads: Iterable[tuple[torch.Tensor, Axis]]) -> None:
    """Sum each local gradient in place over its axis, many at a time. Every rank of an axis gives the same shapes in
    the same order."""
    by_axis: dict[tuple[Axis, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for grad, axis in grads:
        if axis.size > 1:
            by_axis[axis, grad.dtype].append(grad)
    for (axis, _), tensors in by_axis.items():
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            axis.sum_(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
                tensor.copy_(part.view(tensor.shape))


def global_norm(grads: Iterable[Piece], world: Axis, device: torch.device) -> torch.Tensor:
    """The 2-norm over all elements of the model, each counted by its one owner; scalar float64 on `device`, without
    host synchronisation, equal on all ranks."""
    owned = [grad.local for grad in grads if grad.owned and grad.local.numel()]
    square = sum_of_squares(owned) if owned else torch.zeros((), dtype=torch.float64, device=device)
    return world.sum_(square.reshape(1)).sqrt()[0]


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.nbytes
    if bucket:
        yield bucket
