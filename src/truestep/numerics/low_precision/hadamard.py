"""The random Hadamard transform: blocks of 16 values are rotated, so that an outlier is spread over its block.

Both factors of a product are transformed along their contraction dimension; the transform is orthogonal, so the product
stays what it was (arXiv 2404.00456; for the weight's gradient in 4 bits: arXiv 2509.25149, section 4.2).
"""

import torch

SIZE = 16


def hadamard(device: torch.device | str = "cpu") -> torch.Tensor:
    """Sylvester's matrix of 16 over 4, symmetric and orthogonal, fp32."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < SIZE:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / SIZE**0.5


def rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 along the last dimension of fp32 x, times `signs`, through the matrix. By adding and subtracting, in
    one order on every device and for every shape, since quantisation makes a jump of what a matmul may round."""
    blocks = x.unflatten(-1, (-1, SIZE)) * signs
    for width in (1, 2, 4, 8):
        pairs = blocks.unflatten(-1, (-1, 2, width))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        blocks = torch.stack((low + high, low - high), dim=-2).flatten(-3)
    return (blocks / SIZE**0.5).flatten(-2)
