"""Frozen weights in few bits: neighbours of a block share a scale, and are decoded where they are multiplied (QLoRA,
arXiv 2305.14314, without its second quantisation of the scales).

A weight is blocks of BLOCK elements in row order, the last one filled up with zeros, so any shape will do. A block of
zeros decodes to zeros.
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from truestep.errors import ModelError

BLOCK = 64
Kind = Literal["int8", "int4", "nf4", "fp8"]

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 4-bit NormalFloat: quantiles of a normal distribution, with an exact 0 (arXiv 2305.14314, appendix E)."""

_LARGEST = {"int8": 127.0, "int4": 7.0, "nf4": 1.0, "fp8": 448.0}
"""What the largest magnitude of a block becomes."""


def sizes(kind: Kind, count: int) -> tuple[int, int]:
    """Bytes of codes and number of fp32 scales for `count` elements."""
    blocks = -(-count // BLOCK)
    return blocks * BLOCK // (2 if kind in ("int4", "nf4") else 1), blocks


@torch.no_grad()
def encode(weight: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes as flat uint8, scales as flat fp32), each element rounded to the nearest. ModelError for what is not
    finite."""
    flat = weight.detach().float().flatten()
    if not flat.isfinite().all():
        raise ModelError("a weight that is to be quantised has elements that are not finite; the model is broken.")
    x_NB = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale_N1 = x_NB.abs().amax(1, keepdim=True) / _LARGEST[kind]
    x_NB = x_NB / torch.where(scale_N1 > 0, scale_N1, 1.0)
    if kind == "fp8":
        codes = x_NB.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    elif kind == "int8":
        codes = x_NB.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    elif kind == "int4":
        codes = _packed((x_NB.round().clamp(-7, 7) + 8).to(torch.uint8))
    else:
        levels = torch.tensor(NF4, device=flat.device)
        codes = _packed(torch.bucketize(x_NB, (levels[1:] + levels[:-1]) / 2).to(torch.uint8))
    return codes.flatten(), scale_N1.flatten()


def decode(
    codes: torch.Tensor, scales: torch.Tensor, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The weight again; products with the scales are in fp32."""
    if kind == "fp8":
        x = codes.view(torch.float8_e4m3fn).float()
    elif kind == "int8":
        x = codes.view(torch.int8).float()
    elif kind == "int4":
        x = _unpacked(codes).float() - 8.0
    else:
        x = torch.tensor(NF4, device=codes.device)[_unpacked(codes).int()]
    count = torch.Size(shape).numel()
    return (x.view(-1, BLOCK) * scales[:, None]).flatten()[:count].view(shape).to(dtype)


def rounded(weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The weight as it is after it was encoded."""
    return decode(*encode(weight, kind), kind, tuple(weight.shape), weight.dtype)


def _packed(codes_NB: torch.Tensor) -> torch.Tensor:
    return codes_NB[:, ::2] | (codes_NB[:, 1::2] << 4)


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten()


class Held(nn.Module):
    """A frozen weight (O, I) of a linear map in few bits. Its parts are parameters without gradient, so that whoever
    looks after memory looks after them."""

    def __init__(self, kind: Kind, shape: tuple[int, int]):
        super().__init__()
        self.kind: Kind = kind
        self.shape = shape
        num_bytes, blocks = sizes(kind, shape[0] * shape[1])
        self.codes = nn.Parameter(torch.empty(num_bytes, dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(blocks, dtype=torch.float32), requires_grad=False)

    @torch.no_grad()
    def take(self, weight: torch.Tensor) -> None:
        """Become this weight."""
        codes, scales = encode(weight, self.kind)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        return decode(self.codes, self.scales, self.kind, self.shape, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ in the dtype of x or of autocast."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            return _Product.apply(x.to(dtype), self)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    """Keeps nothing for the backward pass: the weight is decoded again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: Held) -> torch.Tensor:
        ctx.held = held
        return linear(x, held.weight(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad @ ctx.held.weight(grad.dtype), None
