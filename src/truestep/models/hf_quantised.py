"""Quantised weights of a directory in Hugging Face layout, read as the numbers that they stand for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from truestep.errors import ModelError
from truestep.models.hf_names import hf_parts
from truestep.models.layers import Linear
from truestep.models.moe import Experts, grouped_product
from truestep.numerics.quantised.inputs import FIXED, InputCast
from truestep.numerics.quantised.scheme import Scheme
from truestep.numerics.quantised.stored import codes_key, from_stored
from truestep.recipe.model import ModelSection

_OF_ROWS = ("weight_packed", "weight", "weight_scale")
_WHOLE = ("weight_zero_point", "weight_global_scale")


class Dequantised:
    """Reads as an open tensor of a file does: `self[region]` decodes the rows that it needs and no others."""

    def __init__(self, slices: Mapping[str, Any], shape: tuple[int, int], scheme: Scheme):
        self._slices, self._shape, self._scheme = slices, shape, scheme

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, region: tuple[slice, ...]) -> torch.Tensor:
        rows = region[0]
        found = {key: self._slices[key][rows] for key in _OF_ROWS if key in self._slices}
        found |= {key: self._slices[key][:] for key in _WHOLE if key in self._slices}
        return from_stored(found, rows, self._shape, self._scheme)[:, region[1]]


def dequantised(found: Mapping[str, Any], scheme: Scheme, where: Path) -> dict[str, Any]:
    """Open tensors by name, with each quantised weight in the place of the tensors that it is stored in."""
    suffix = f".{codes_key(scheme)}"
    modules = [name.removesuffix(suffix) for name in found if name.endswith(suffix)]
    modules = [name for name in modules if f"{name}.weight_scale" in found]
    parts: dict[str, dict[str, Any]] = {module: {} for module in modules}
    plain = {}
    for name, slices in found.items():
        module, _, key = name.rpartition(".")
        (parts[module] if module in parts and key != "bias" else plain)[name if module not in parts else key] = slices
    return plain | {f"{module}.weight": _weight(one, scheme, where, module) for module, one in parts.items()}


def _weight(slices: Mapping[str, Any], scheme: Scheme, where: Path, module: str) -> Dequantised:
    needed = {codes_key(scheme), "weight_scale"} | ({"weight_global_scale"} if scheme.kind == "nvfp4" else set())
    needed |= set() if scheme.symmetric else {"weight_zero_point"}
    needed |= {"weight_shape"} if scheme.kind == "int" else set()
    needed |= {FIXED[scheme.inputs]} if scheme.inputs in FIXED else set()
    if missing := sorted(needed - slices.keys()):
        raise ModelError(f"{where} lacks {module}.{missing[0]}, without which its codes mean nothing; fetch it again.")
    if scheme.kind == "int":
        outputs, inputs = slices["weight_shape"][:].tolist()
    else:
        outputs, inputs = slices[codes_key(scheme)].get_shape()
        inputs *= 2 if scheme.kind == "nvfp4" else 1
    return Dequantised(slices, (outputs, inputs), scheme)


def cast_inputs(model: nn.Module, section: ModelSection, scheme: Scheme, found: Mapping[str, Any]) -> None:
    """Let the products of a model that is whole cast their inputs as its quantised maps want them. `found`: the open
    tensors as they are stored."""
    for prefix, module in model.named_modules():
        if isinstance(module, Linear):
            ((theirs, _),) = hf_parts(f"{prefix}.weight", section)
        elif isinstance(module, Experts):
            theirs = hf_parts(f"{prefix}.gate", section)[0][0]
        else:
            continue
        stem = theirs.removesuffix(".weight")
        if f"{stem}.weight_scale" not in found:
            continue
        scale = found[f"{stem}.{FIXED[scheme.inputs]}"][:] if scheme.inputs in FIXED else None
        cast = InputCast(scheme.inputs, scale)
        if isinstance(module, Experts):
            module.product = _of_experts(cast)
        else:
            module.product = cast


def _of_experts(cast: InputCast) -> Any:
    return lambda rows_MD, weight_EFD, ends_E: grouped_product(cast.cast(rows_MD), weight_EFD, ends_E)
