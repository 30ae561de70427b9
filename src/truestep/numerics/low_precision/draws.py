"""Random numbers of low precision by counter: a draw depends on the seed, the step, the microbatch, the parameter's
name, the use, and the element's place in the global tensor; never on the rank, the mesh, or what was drawn before."""

import torch

from truestep.numerics.counter import key_of, words

_BLOCKS = {"cpu": 1 << 16, "cuda": 1 << 21}
"""Counters at a time: their temporaries are 30 times as large. A GPU with few would do little but start kernels."""


class Draws:
    """The moment that draws belong to. `begin` is called before each forward pass of a microbatch, and before its
    backward pass where another microbatch's forward lies between (a pipeline), so that recomputation draws the same.

    `microbatch`: its number in the global batch, which no data-parallel degree changes."""

    def __init__(self, seed: int):
        self.seed = seed
        self.moment = (0, 0)

    def begin(self, step: int, microbatch: int) -> None:
        self.moment = (step, microbatch)

    def sixteen_bits(
        self, name: str, use: str, moment: tuple[int, int], tokens_N: torch.Tensor, start: int, size: int, whole: int
    ) -> torch.Tensor:
        """Integers in [0, 2^16), int32 (N, size): for global tokens `tokens_N` and features [start, start + size) of
        `whole`. A counter gives eight neighbouring features of one token."""
        key = key_of(self.seed, f"low precision {name} {use} step {moment[0]} microbatch {moment[1]}")
        first, stop = start // 8, -(-(start + size) // 8)
        counters = torch.arange(first, stop, device=tokens_N.device)
        rows = max(1, _BLOCKS[tokens_N.device.type] // len(counters))
        drawn = [
            _halves(words(key, part[:, None] * -(-whole // 8) + counters))[:, start - 8 * first :][:, :size]
            for part in tokens_N.split(rows)
        ]
        return torch.cat(drawn) if drawn else torch.empty(0, size, dtype=torch.int32, device=tokens_N.device)


def signs(seed: int, device: torch.device) -> torch.Tensor:
    """The 16 signs ±1 (fp32) of the random Hadamard transform: one set for a run, as in arXiv 2509.25149, section 4.2,
    so that one transformed activation serves all linear maps that take it."""
    word = words(key_of(seed, "low precision hadamard"), torch.zeros(1, dtype=torch.int64, device=device))[0, 0]
    return 1.0 - 2.0 * ((word >> torch.arange(16, device=device)) & 1).float()


def _halves(word: torch.Tensor) -> torch.Tensor:
    """(..., blocks, 4) words of 32 bits to (..., blocks · 8) of 16."""
    return torch.stack((word & 0xFFFF, word >> 16), dim=-1).to(torch.int32).flatten(-3)
