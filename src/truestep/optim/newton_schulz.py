"""The orthogonal factor of a matrix, approximately, by the Newton-Schulz iteration of Muon (Keller Jordan, "Muon: An
optimizer for hidden layers in neural networks", 2024)."""

from collections import defaultdict
from collections.abc import Sequence
from math import prod

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""X <- aX + (bA + cA²)X with A = XXᵀ: the steepest quintic at 0 that keeps singular values near 1 (between about 0.7
and 1.2 after five steps), which is as good for training as exactly 1."""

_BATCH_ELEMENTS = 1 << 24
_BATCH_MATRICES = 8


def orthogonalise(matrix_MN: torch.Tensor, num_iterations: int, dtype: torch.dtype) -> torch.Tensor:
    """U Vᵀ of matrix = U S Vᵀ, approximately; the products are made in `dtype`, which the result has. A zero matrix
    gives zero. Of a batch of matrices, each by itself."""
    x = matrix_MN.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT.contiguous() if tall else x.contiguous()
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    fused = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = fused(x, fused(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def orthogonalise_stacks(stacks: Sequence[torch.Tensor], num_iterations: int, dtype: torch.dtype) -> None:
    """Each matrix of stacks (C, M, N) by itself, in place. Matrices of one shape are done in batches whose size is that
    of the shape, filled up with zeros, since the order of sums in a product may go by the size of its batch: the bits
    of a result do not depend on what else this rank has to do."""
    by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
    for stack in stacks:
        by_shape[stack.shape[1:]].extend(stack.unbind())
    for shape, matrices in by_shape.items():
        size = max(1, min(_BATCH_MATRICES, _BATCH_ELEMENTS // shape.numel()))
        for start in range(0, len(matrices), size):
            some = matrices[start : start + size]
            filling = [torch.zeros_like(some[0])] * (size - len(some))
            for matrix, result in zip(some, orthogonalise(torch.stack(some + filling), num_iterations, dtype)):
                matrix.copy_(result)


def cost(shape: Sequence[int]) -> int:
    """Multiply-adds of one iteration, of a matrix or of all matrices of a stack."""
    short, long = sorted(shape[-2:])
    return prod(shape[:-2]) * (2 * short * short * long + short**3)
