"""A short test of the device that this process runs on: products whose bits are known, and memory that keeps patterns.

Everything is made of small whole numbers, whose products and sums are exact in every number format and in any order, so
that one wrong bit shows, and the tiles of a large product are copies of a small one that the host computes as integers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from truestep.numerics.fixed_point import GOLDEN

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TILE, _DEPTH = 64, 96
"""Sums of 96 products of -1, 0 and 1 stay below 2^8, which bfloat16 counts exactly."""
_PATTERNS = (0x5555555555555555, -0x5555555555555556, 0, -1)

Strike = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class Sizes:
    """`tiles` x `tiles` tiles of a product in each format, and bytes of memory."""

    tiles: int
    memory_bytes: int


SHORT = {"cpu": Sizes(4, 4 << 20), "cuda": Sizes(64, 256 << 20)}
"""Some 10 ms."""
LONG = {"cpu": Sizes(8, 16 << 20), "cuda": Sizes(128, 2 << 30)}
"""Some 100 ms; for a start."""


def check_device(device: torch.device, sizes: Sizes, strike: Strike | None = None) -> str:
    """What is wrong with the device, as a sentence; empty: nothing. `strike(what, tensor)` is for tests."""
    strike = strike or (lambda what, tensor: None)
    return check_products(device, sizes.tiles, strike) or check_memory(device, sizes.memory_bytes, strike)


def check_products(device: torch.device, tiles: int, strike: Strike) -> str:
    """Products in every number format, compared bit for bit with what integers on the host give."""
    index = torch.arange(_TILE)[:, None] * _DEPTH + torch.arange(_DEPTH)[None]
    a, b = (index * 7 + index // 11) % 3 - 1, (index * 5 + index // 13) % 3 - 1
    right = a @ b.T
    for dtype in DTYPES:
        left_hand, right_hand = (x.to(device, dtype).repeat(tiles, 1) for x in (a, b))
        found = left_hand @ right_hand.T
        strike(f"product {dtype}", found)
        wrong = found.view(tiles, _TILE, tiles, _TILE) != right.to(device, dtype)[None, :, None]
        if count := int(wrong.sum()):
            return f"{count} of {wrong.numel()} elements of a product in {str(dtype).removeprefix('torch.')} are wrong"
    return ""


def check_memory(device: torch.device, num_bytes: int, strike: Strike) -> str:
    """Words that all differ, then patterns and their complements, written, and read again after all were written."""
    words = torch.arange(num_bytes // 8, device=device)
    words.mul_(GOLDEN)  # odd, so that no two words are alike
    strike("memory", words)
    again = torch.arange(num_bytes // 8, device=device).mul_(GOLDEN)
    wrong = int((words != again).sum())
    for pattern in _PATTERNS:
        words.fill_(pattern)
        strike("pattern", words)
        wrong += int((words != pattern).sum())
    return f"{wrong} of {5 * (num_bytes // 8)} words of memory did not keep what was written" if wrong else ""
