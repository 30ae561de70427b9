"""Inputs of a product in the format that a quantised model wants them in, by the same numbers in wide arithmetic."""

import torch
from torch.nn.functional import linear

from truestep.numerics.formats import E4M3, encode
from truestep.numerics.quantised.grid import nv_inputs, nv_outer
from truestep.numerics.quantised.scheme import Inputs

FIXED: dict[Inputs, str] = {"tensor": "input_scale", "blocks": "input_global_scale"}
"""Ways with a scale that was found beforehand, and its name in files."""


def fixed_scale(inputs: Inputs, top: float, dtype: torch.dtype) -> torch.Tensor:
    """The stored scale (1,) of inputs up to `top`."""
    if inputs == "blocks":
        return nv_outer(top)
    return torch.tensor([max(top / E4M3.largest, torch.finfo(dtype).tiny)], dtype=dtype)


class InputCast:
    """(x (..., T, inputs), W) -> cast(x) Wᵀ: the seam of low precision of a Linear."""

    def __init__(self, inputs: Inputs, scale: torch.Tensor | None = None):
        self.inputs, self.scale = inputs, scale

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(self.cast(x), weight)

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """x as the format has it, in its dtype."""
        if self.inputs == "token":
            tiny = torch.finfo(x.dtype).tiny
            return _fp8(x, (x.abs().amax(-1, keepdim=True) / E4M3.largest).clamp(min=tiny))
        assert self.scale is not None
        scale = self.scale.to(x.device)
        return nv_inputs(x, scale) if self.inputs == "blocks" else _fp8(x, scale.to(x.dtype))


def _fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return encode(x / scale, E4M3).to(x.dtype) * scale
