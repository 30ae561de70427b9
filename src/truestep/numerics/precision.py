"""Which dtype a model computes in, decided once by measurement; and why master weights are never 16 bits wide."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from truestep.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """`chosen`: a dtype's name. `measured`: seconds of a step by dtype, empty where nothing was measured.
    Plain values: recorded in the run log and sent from rank 0 to the others as they are."""

    chosen: str
    measured: dict[str, float]
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.chosen]


def resolve_precision(asked: str, device: torch.device, measure: Callable[[], dict[str, float]] | None) -> Precision:
    """What `machine.precision` means on `device`. "auto": bfloat16 on CUDA that has it; on a CPU where `measure`, which
    gives seconds of a step by dtype, finds it at least a tenth faster than float32 (without a measure: float32).
    Measures, so ranks may differ: let rank 0 decide for all."""
    if asked != "auto":
        return Precision(asked, {}, "asked for in the recipe")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bfloat16", {}, f"{torch.cuda.get_device_name(device)} has bfloat16 units")
        return Precision("float32", {}, f"{torch.cuda.get_device_name(device)} has no bfloat16 units")
    if measure is None:
        return Precision("float32", {}, "nothing was measured")
    seconds = measure()
    share = seconds["bfloat16"] / seconds["float32"]
    chosen = "bfloat16" if share < 0.9 else "float32"
    return Precision(chosen, seconds, f"a step in bfloat16 takes {share:.2f} times as long as in float32 here")


def require_master(named_params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse to train weights of less than fp32: an update below half their spacing (1/512 of a bfloat16 weight) is
    lost in rounding, however often it is repeated."""
    for name, param in named_params:
        if param.requires_grad and param.dtype not in (torch.float32, torch.float64):
            dtype = str(param.dtype).removeprefix("torch.")
            raise UserError(
                f"parameter {name!r} is {dtype}: updates that are small beside it would vanish; keep it in float32 "
                f"(machine.precision sets the dtype of the computation)."
            )
