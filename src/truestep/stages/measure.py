"""What is chosen by measurement: measured once, recorded in the run directory, and used again on resume."""

import json
import platform
import re
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from truestep.factors.devices import device_peak
from truestep.files import publish
from truestep.losses.cross_entropy import linear_cross_entropy
from truestep.models.build import build_model, init_weights
from truestep.numerics.precision import resolve_precision
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage
from truestep.stages.context import Context


def measure_precision(context: Context, stage: Stage, section: ModelSection) -> str:
    """The compute dtype that machine.precision means here, for this model."""
    asked = context.recipe.machine.precision
    if asked != "auto":
        return asked
    measure = None if section.module else partial(step_seconds, section, stage.context)

    def decide() -> dict[str, Any]:
        precision = resolve_precision(asked, context.job.device, measure)
        return {"chosen": precision.chosen, "seconds": precision.measured, "reason": precision.reason}

    model = "your own module" if section.module else f"{section.num_layers} layers of width {section.hidden_size}"
    found = _once(context, f"precision of {model} on {_device(context)}, rows of {stage.context}", decide)
    context.progress.say(f"precision {found['chosen']}: {found['reason']}")
    return found["chosen"]


def step_seconds(section: ModelSection, length: int, rounds: int = 4) -> dict[str, float]:
    """Estimated seconds of forward and backward of one row on this CPU by dtype, weights in fp32: what the first and a
    second layer take is measured, casts, attention and head included, and carried on to all layers."""
    models = [_of_layers(section, layers) for layers in (1, 2)]
    seconds: dict[str, list[list[float]]] = {name: [[], []] for name in ("float32", "bfloat16")}
    tokens_BT = torch.arange(length)[None] % section.vocab_size
    for round_ in range(rounds + 1):
        for name, times in seconds.items():  # in turns, so that other load hits both
            for model, found in zip(models, times):
                began = time.perf_counter()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "bfloat16"):
                    total = model(
                        tokens_BT, head=lambda out: linear_cross_entropy(out.hidden_BTD, out.weight_VD, tokens_BT)
                    )
                total[0].backward()
                if round_ > 0:  # the first call sets things up
                    found.append(time.perf_counter() - began)
    medians = {name: (median(one), median(two)) for name, (one, two) in seconds.items()}
    return {name: one + (section.num_layers - 1) * max(two - one, 0.0) for name, (one, two) in medians.items()}


def _of_layers(section: ModelSection, num_layers: int) -> torch.nn.Module:
    few = section.model_copy(update={"num_layers": num_layers, "scores": False})
    model = build_model(few, section.vocab_size).to_empty(device="cpu")
    init_weights(model, 0)
    return model


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


def hardware(device: torch.device) -> str:
    """The chip that computes, as far as kernels are chosen by it: another CPU of a family may round otherwise."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", known.read_text()) if known.exists() else None
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}" + (f", {found[1]}" if found else "")


def versions() -> dict[str, str]:
    """What the bits of a result may depend on beside the recipe."""
    return {
        "truestep": version("truestep"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "none",
    }
