"""Rotary positions (arXiv 2104.09864) with linear, llama3 and yarn (arXiv 2309.00071) scaling.

Tables are made anew from float64 for each forward pass, shared by all layers. They are no parameters and no buffers:
`model.to(bfloat16)`, a build on the meta device and FSDP's casts of inputs do not touch them.
"""

import math
from typing import Any

import torch

from truestep.recipe.model import RopeScaling


class RopeTables:
    """cos and sin of position times frequency, (B or 1, T, 1, K / 2), at least fp32. No dataclass (see LayerInput)."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        self.cos = cos
        self.sin = sin

    def rotate(self, x_BTHK: torch.Tensor) -> torch.Tensor:
        """Rotate the pairs (k, k + K/2) of every head; the result has the dtype of x."""
        return _Rotate.apply(x_BTHK, self.cos, self.sin)  # pyright: ignore[reportReturnType]


class Rope:
    """Frequencies of one kind of layer; `tables` turns positions into cos and sin."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None):
        self._frequencies, self._factor = frequencies(head_dim, theta, scaling)
        self._on: dict[torch.device, torch.Tensor] = {}

    def tables(self, positions_BT: torch.Tensor, dtype: torch.dtype) -> RopeTables:
        device = positions_BT.device
        if device not in self._on:
            self._on[device] = self._frequencies.to(device)
        angle = positions_BT[:, :, None, None].double() * self._on[device]
        dtype = torch.promote_types(dtype, torch.float32)
        return RopeTables((angle.cos() * self._factor).to(dtype), (angle.sin() * self._factor).to(dtype))


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[torch.Tensor, float]:
    """Frequencies, float64 (head_dim / 2), in radians a token, and the factor on cos and sin."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    plain = 1.0 / theta**exponent
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    factor = scaling.attention_factor
    if factor is None:
        one, all_dim = scaling.mscale, scaling.mscale_all_dim
        factor = _mscale(scaling, one) / _mscale(scaling, all_dim) if one and all_dim else _mscale(scaling, 1.0)
    return _yarn(plain, head_dim, theta, scaling), factor


def score_factor(scaling: RopeScaling | None) -> float:
    """What latent attention multiplies its scores by besides: m(mscale_all_dim)^2, as DeepSeek-V3 has it."""
    all_dim = scaling.mscale_all_dim if scaling is not None else None
    return 1.0 if scaling is None or all_dim is None else _mscale(scaling, all_dim) ** 2


def _mscale(scaling: RopeScaling, mscale: float) -> float:
    return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow frequencies are divided by `factor`, fast ones kept, with a linear passage in turns per original context."""
    turns = scaling.original_context * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * plain / scaling.factor + keep * plain


def _yarn(plain: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Section 3.2 of the paper: a ramp over the pair's index between `beta_fast` and `beta_slow` turns."""

    def index_of(turns: float) -> float:
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(index_of(scaling.beta_fast)), 0)
    high = min(math.ceil(index_of(scaling.beta_slow)), head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
    slow = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return slow * plain / scaling.factor + (1.0 - slow) * plain


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so nothing but the tables is kept and no half is copied twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn_pairs(x, cos, sin, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn_pairs(grads[0], cos, sin, 1), None, None


def _turn_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    a, b = a.to(cos.dtype), b.to(cos.dtype)
    turned = ((a * cos).addcmul_(b, sin, value=sign), (b * cos).addcmul_(a, sin, value=-sign))
    return torch.cat(turned, dim=-1).to(x.dtype)
