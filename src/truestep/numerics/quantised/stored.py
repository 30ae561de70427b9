"""Quantised weights as tensors of files: the compressed-tensors layout, both ways."""

from collections.abc import Mapping

import torch

from truestep.numerics.quantised.grid import Scales, to_values
from truestep.numerics.quantised.scheme import Scheme

_WORD = 32


def codes_key(scheme: Scheme) -> str:
    """What follows a module's name in that of its codes."""
    return "weight" if scheme.kind == "fp8" else "weight_packed"


def to_stored(codes: torch.Tensor, scales: Scales, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The tensors of one weight, by what follows the module's name."""
    found = {codes_key(scheme): codes, "weight_scale": scales.scale_OG}
    if scheme.kind == "int":
        found["weight_packed"] = pack(codes, scheme.bits)
        found["weight_shape"] = torch.tensor(codes.shape)
    if scales.zero_OG is not None:
        found["weight_zero_point"] = pack(scales.zero_OG.t(), scheme.bits).t().contiguous()
    if scales.outer is not None:
        found["weight_global_scale"] = scales.outer
    return found


def from_stored(found: Mapping[str, torch.Tensor], rows: slice, shape: tuple[int, int], scheme: Scheme) -> torch.Tensor:
    """The values of some rows of a weight of `shape`. Codes and scales are those of these rows; the rest is whole."""
    codes, zero = found[codes_key(scheme)], None
    if scheme.kind == "int":
        codes = unpack(codes, scheme.bits, shape[1])
    if not scheme.symmetric:
        zero = unpack(found["weight_zero_point"].t(), scheme.bits, shape[0]).t()[rows]
    return to_values(codes, Scales(found["weight_scale"], zero, found.get("weight_global_scale")), scheme)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 codes (rows, n) to int32 words (rows, n · bits / 32, rounded up), the first code in the lowest bits; each is
    stored as the number from the least one."""
    per_word = _WORD // bits
    missing = -codes.shape[1] % per_word
    numbers = codes.to(torch.int64) + (1 << (bits - 1))
    numbers = torch.nn.functional.pad(numbers, (0, missing)).unflatten(1, (-1, per_word))
    words = (numbers << (torch.arange(per_word, device=codes.device) * bits)).sum(-1)
    return torch.where(words >= 1 << (_WORD - 1), words - (1 << _WORD), words).to(torch.int32)


def unpack(words: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """The first n int8 codes of each row of `pack`."""
    shifts = torch.arange(_WORD // bits, device=words.device) * bits
    numbers = (words.to(torch.int64)[..., None] >> shifts) & ((1 << bits) - 1)
    return (numbers.flatten(1)[:, :n] - (1 << (bits - 1))).to(torch.int8)
