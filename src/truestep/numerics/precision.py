"""Which dtype a model computes in, decided once by measurement; and why master weights are never 16 bits wide."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch

from truestep.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """`chosen`: a dtype's name. `measured`: seconds of one matrix product by dtype, empty where nothing was measured.
    Plain values: recorded in the run log and sent from rank 0 to the others as they are."""

    chosen: str
    measured: dict[str, float]
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.chosen]


def resolve_precision(asked: str, device: torch.device) -> Precision:
    """What `machine.precision` means on `device`. "auto": bfloat16 on CUDA that has it, and on a CPU if its products
    are at least a quarter faster than in fp32; else float32. Measures, so ranks may differ: let rank 0 decide for
    all."""
    if asked != "auto":
        return Precision(asked, {}, "asked for in the recipe")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bfloat16", {}, f"{torch.cuda.get_device_name(device)} has bfloat16 units")
        return Precision("float32", {}, f"{torch.cuda.get_device_name(device)} has no bfloat16 units")
    seconds = _matmul_seconds()
    ratio = seconds["float32"] / seconds["bfloat16"]
    chosen = "bfloat16" if ratio > 1.25 else "float32"
    return Precision(chosen, seconds, f"a bfloat16 product takes {1 / ratio:.2f} times as long as a float32 one here")


def _matmul_seconds(size: int = 256, rounds: int = 5) -> dict[str, float]:
    """Median seconds of x @ w.T on this CPU, the two dtypes in turn so that other load hits both."""
    factors = {name: torch.ones(size, size, dtype=DTYPES[name]) for name in ("float32", "bfloat16")}
    seconds: dict[str, list[float]] = {name: [] for name in factors}
    for round_ in range(rounds + 1):
        for name, x in factors.items():
            start = time.perf_counter()
            torch.nn.functional.linear(x, x)
            if round_ > 0:  # the first call sets things up
                seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


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
