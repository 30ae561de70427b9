"""What is chosen by measurement: measured once, recorded in the run directory, and used again on resume."""

import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from truestep.factors.devices import device_peak
from truestep.files import publish
from truestep.numerics.precision import resolve_precision
from truestep.stages.context import Context


def measure_precision(context: Context) -> str:
    """The compute dtype that machine.precision means here."""
    asked = context.recipe.machine.precision
    if asked != "auto":
        return asked

    def decide() -> dict[str, Any]:
        precision = resolve_precision(asked, context.job.device)
        return {"chosen": precision.chosen, "seconds": precision.measured, "reason": precision.reason}

    found = _once(context, f"precision on {_device(context)}", decide)
    context.progress.say(f"precision {found['chosen']}: {found['reason']}")
    return found["chosen"]


def measure_peak(context: Context, precision: str) -> tuple[float | None, str | None]:
    """Peak FLOP/s of one device and where the figure comes from: declared, known, or measured by a matrix product."""
    declared = context.recipe.ledger.peak_flops
    if declared != "auto":
        return declared, "declared in the recipe (ledger.peak_flops)"
    known = device_peak(_device(context), precision)
    if known is not None:
        return known.flops, known.source
    threads = torch.get_num_threads()
    name = f"matmul peak on {_device(context)}, {precision}, {threads} threads"
    found = _once(context, name, lambda: {"flops": matmul_peak(context.job.device, precision)})
    return found["flops"], f"measured: best of 12 matrix products of 1024 x 1024, {precision}, {threads} threads"


def matmul_peak(device: torch.device, precision: str, size: int = 1024, rounds: int = 12) -> float:
    """FLOP/s of the fastest of some square matrix products."""
    a = torch.ones(size, size, dtype=getattr(torch, precision), device=device)
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _device(context: Context) -> str:
    device = context.job.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _once(context: Context, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    file = context.run_dir / "measured.json"

    def recorded() -> dict[str, Any]:
        known = json.loads(file.read_text()) if file.exists() else {}
        if name not in known:
            known[name] = measure()
            publish(file, json.dumps(known, indent=1).encode())
            context.note("note", text=f"measured: {name}", values=known[name])
        return known[name]

    return context.job.agree(f"measure/{name}", recorded)


def versions() -> dict[str, str]:
    """What the bits of a result may depend on beside the recipe."""
    return {
        "truestep": version("truestep"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "none",
    }
