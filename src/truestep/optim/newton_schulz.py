"""The orthogonal factor of a matrix, approximately, by the Newton-Schulz iteration of Muon (Keller Jordan, "Muon: An
optimizer for hidden layers in neural networks", 2024)."""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""X <- aX + (bA + cA²)X with A = XXᵀ: the steepest quintic at 0 that keeps singular values near 1 (between about 0.7
and 1.2 after five steps), which is as good for training as exactly 1."""


def orthogonalise(matrix_MN: torch.Tensor, num_iterations: int, dtype: torch.dtype) -> torch.Tensor:
    """U Vᵀ of matrix = U S Vᵀ, approximately; the products are made in `dtype`, which the result has. A zero matrix
    gives zero."""
    x = matrix_MN.to(dtype)
    tall = x.shape[0] > x.shape[1]
    x = x.T.contiguous() if tall else x.contiguous()
    x = x / (x.norm() + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(num_iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).contiguous()


def cost(shape: torch.Size) -> int:
    """Multiply-adds of one iteration."""
    short, long = min(shape), max(shape)
    return 2 * short * short * long + short**3
