"""One weight after the other from what it was to what the files hold of it."""

import torch

from truestep.errors import ModelError
from truestep.numerics.quantised.grid import Scales, find_scales, to_codes, to_values
from truestep.numerics.quantised.scheme import Scheme
from truestep.numerics.quantised.stored import to_stored
from truestep.quant.gptq import Rounded, gptq


def scheme_of(name: str, group: int, symmetric: bool, act_order: bool) -> Scheme:
    """The scheme that a recipe's quantise.scheme names."""
    match name:
        case "int8":
            return Scheme("int", 8, 0, symmetric, act_order=act_order)
        case "int4":
            return Scheme("int", 4, max(group, 0), symmetric, act_order=act_order)
        case "fp8":
            return Scheme("fp8", 8, inputs="token")
        case "fp8-static":
            return Scheme("fp8", 8, inputs="tensor")
        case "nvfp4":
            return Scheme("nvfp4", 4, 16)
        case "nvfp4-static":
            return Scheme("nvfp4", 4, 16, inputs="blocks")
    raise ValueError(name)


def check_finite(name: str, weight: torch.Tensor) -> None:
    """ModelError for a weight that no format has room for."""
    if not bool(weight.isfinite().all()):
        count = int((~weight.isfinite()).sum())
        raise ModelError(
            f"{name} has {count} of {weight.numel()} elements that are not finite, which no scale can hold; quantise "
            f"an earlier model of the run"
        )


def round_weight(
    weight_OI: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    seen_II: torch.Tensor | None = None,
    damp: float = 0.01,
    top: float = 0.0,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Its tensors for files by what follows the module's name, and the values that they stand for, in `dtype`. By GPTQ
    where `seen_II` is given, else to nearest. `top`: see find_scales."""
    wide = weight_OI.detach().float()
    if seen_II is not None:
        found = gptq(wide, seen_II, scheme, dtype, damp)
    else:
        found = nearest(wide, scheme, dtype, top)
    values = to_values(found.codes, found.scales, scheme).to(dtype)
    return to_stored(found.codes, found.scales, scheme), values


def nearest(weight_OI: torch.Tensor, scheme: Scheme, dtype: torch.dtype, top: float = 0.0) -> Rounded:
    """Round an fp32 weight to nearest."""
    scales: Scales = find_scales(weight_OI, scheme, dtype, top=top)
    return Rounded(to_codes(weight_OI, scales, scheme), scales, float("nan"))
