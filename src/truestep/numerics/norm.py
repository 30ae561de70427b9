"""Sums of squares of many tensors."""

from collections.abc import Sequence
from functools import reduce

import torch


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Over all elements of local tensors of one device; scalar float64."""
    wide = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
    norms = torch._foreach_norm(list(tensors), 2, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).double().square().sum()
