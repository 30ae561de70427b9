"""Steps that are done again on one GPU: are they bitwise, in the same process and in another, and what does that cost?

    python benchmarks/gpu_replay.py --out gpu-replay.json    under 5 minutes
    python benchmarks/gpu_replay.py --dry                    all of it at a tiny size on the CPU; measures nothing

Needs this repository, torch >= 2.11 and pydantic; truestep need not be installed. Every section stands alone (`--only
cost` runs one).

restored   20 steps, the state kept after the 10th and put back into a state built anew: steps 11 to 20 once more
process    the same 20 steps in another process
cost       time of a step: "fast", "fast" with kernels that repeat themselves, "exact"; and of digests of everything

What a bit may depend on is stored with the result (`conditions`).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it at the first product

from gpu_checks import Place, Row
from gpu_parallel import learnable, made, said
from gpu_train import BEGAN, elapsed_s, fresh, log

# isort: split
import torch

from truestep.numerics.batch import Batch
from truestep.numerics.fingerprint import combined
from truestep.numerics.repeatable import repeatable
from truestep.train.digests import Digests
from truestep.train.state import TrainState
from truestep.train.step import train_step

STEPS, DRY_STEPS = 20, 4
WAYS = {"exact": "exact", "fast, repeatable kernels": "fast"}
"""What is claimed to repeat itself, by the reduction that it takes."""


@dataclass(frozen=True)
class Sign:
    """What a step leaves: loss, gradient norm, digests of the gradient and of the state."""

    loss: str
    grad_norm: str
    gradient: str
    state: str


def build(place: Place, reduction: str) -> TrainState:
    length, rows = (64, 2) if place.dry else (4096, 2)
    state = made(place, length, rows, {"reduction": reduction}, num_layers=2 if place.dry else 8)
    state.digests = Digests("b", state.job, state.parallel.gradients, state.tensors, every=1)
    return state


def rows_of(place: Place, steps: int = 0) -> list[Batch]:
    length, rows = (64, 2) if place.dry else (4096, 2)
    return learnable(place, length, rows, steps or (DRY_STEPS if place.dry else STEPS))


def run(place: Place, state: TrainState, batches: list[Batch]) -> list[Sign]:
    """Steps with kernels that repeat themselves, and what each leaves. (In "exact" mode they would anyhow.)"""
    signs = []
    for batch in batches:
        with repeatable(place.device):
            result = train_step(state, [batch], batch.num_targets, [])
        assert state.digests is not None
        state.digests.stepped(state.step)
        texts = {kind: combined(found.keys(), found.values()) for kind, found in state.digests.taken.items()}
        signs.append(Sign(result.loss.hex(), result.grad_norm.hex(), texts["gradient"], texts["state"]))
    return signs


def first_apart(one: list[Sign], other: list[Sign]) -> str:
    """Where two lists of steps part, in words; empty if they do not."""
    for step, (a, b) in enumerate(zip(one, other, strict=True), 1):
        if a != b:
            names = [name for name, value in asdict(a).items() if value != asdict(b)[name]]
            return f"step {step} of {len(one)}: {', '.join(names)}"
    return ""


def restored(place: Place, figures: dict[str, Any]) -> Iterator[Row]:
    batches = rows_of(place)
    kept_at = len(batches) // 2
    for way, reduction in WAYS.items():
        fresh()
        state = build(place, reduction)
        run(place, state, batches[:kept_at])
        kept = {name: piece.local.clone().cpu() for name, piece in state.tensors().items()}, state.extra()
        signs = run(place, state, batches[kept_at:])
        del state
        fresh()
        again = build(place, reduction)
        for name, piece in again.tensors().items():
            piece.local.copy_(kept[0][name])
        again.restore(kept[1])
        apart = first_apart(signs, run(place, again, batches[kept_at:]))
        figures[way] = {"steps": len(signs), "apart": apart, "last": asdict(signs[-1])}
        yield Row("restored", way, apart or f"{len(signs)} steps after a restore: every bit equal", not apart)


def process(place: Place, figures: dict[str, Any]) -> Iterator[Row]:
    for way, reduction in WAYS.items():
        fresh()
        mine = run(place, build(place, reduction), rows_of(place))
        fresh()
        command = [sys.executable, __file__, "--signs", reduction, *(["--dry"] if place.dry else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        theirs = [Sign(**sign) for sign in json.loads(done.stdout.splitlines()[-1])]
        apart = first_apart(mine, theirs)
        figures[way] = {"steps": len(mine), "apart": apart, "last": asdict(mine[-1])}
        yield Row("process", way, apart or f"{len(mine)} steps in another process: every bit equal", not apart)


def cost(place: Place, figures: dict[str, Any]) -> Iterator[Row]:
    rounds = 3 if place.dry else 15
    batches = rows_of(place, rounds)
    states = {way: build(place, reduction) for way, reduction in (("fast", "fast"), *WAYS.items())}
    digests = states["exact"].digests
    for state in states.values():
        state.digests = None
    seconds: dict[str, list[float]] = {way: [] for way in (*states, "digests")}
    for index, batch in enumerate(batches):
        for way in list(states) if index % 2 else list(states)[::-1]:
            took = timed(place, lambda way=way, batch=batch: step(place, states[way], batch, way))
            seconds[way] += [took] if index > 1 else []  # the first ones compile, and of exact is computed twice
    assert digests is not None
    for index in range(rounds):
        seconds["digests"].append(timed(place, lambda index=index: digests.state(-2 - index)))
    figures |= {"seconds": seconds}
    fast, num_bytes = median(seconds["fast"]), sum(p.local.nbytes for p in states["exact"].tensors().values())
    for way in WAYS:
        ratios = [a / b for a, b in zip(seconds[way], seconds["fast"])]
        figures[f"{way} / fast"] = None if place.dry else median(ratios)
        yield Row("cost", f"{way} / fast", place.times(ratios))
    a_sweep = median(seconds["digests"])
    text = (
        f"{num_bytes / 2**30:.2f} GiB of state at {num_bytes / a_sweep / 1e9:.0f} GB/s; {a_sweep / fast:.3f} of a step"
    )
    yield Row("cost", "digests of all state", "no time (dry)" if place.dry else text)


def step(place: Place, state: TrainState, batch: Batch, way: str) -> None:
    with repeatable(place.device) if way != "fast" else nullcontext():
        train_step(state, [batch], batch.num_targets, [])


def timed(place: Place, work: Callable[[], Any]) -> float:
    place.sync()
    began = time.perf_counter()
    work()
    place.sync()
    return time.perf_counter() - began


SECTIONS: dict[str, Callable[[Place, dict[str, Any]], Iterator[Row]]] = {
    "restored": restored,
    "process": process,
    "cost": cost,
}


def conditions(place: Place) -> dict[str, Any]:
    """What the bits of a step may depend on."""
    found = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cublas_workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "precision": "bfloat16",
        "compiled_blocks": place.on_cuda,
        "steps": DRY_STEPS if place.dry else STEPS,
    }
    if place.on_cuda:
        properties = torch.cuda.get_device_properties(place.device)
        found |= {
            "device": properties.name,
            "capability": list(torch.cuda.get_device_capability(place.device)),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "attention": {
                "flash": torch.backends.cuda.flash_sdp_enabled(),
                "memory_efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
                "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
                "math": torch.backends.cuda.math_sdp_enabled(),
            },
        }
    return found


def section(name: str, place: Place) -> dict[str, Any]:
    """One section; what goes wrong in it is a row and stops no other."""
    figures, rows, error = {}, [], None
    log(f"{name} begins")
    fresh()
    try:
        if elapsed_s() > place.seconds:
            raise TimeoutError(f"not begun after {elapsed_s():.0f} s; run it alone: --only {name}")
        for row in SECTIONS[name](place, figures):
            rows.append(row)
    except Exception as problem:
        error = said(problem)
        sys.excepthook(type(problem), problem, problem.__traceback__)
        rows.append(Row(name, "ERROR", error, False))
    for row in rows:
        verdict = {True: "ok", False: "MISSED", None: "-"}[row.good]
        print(f"{row.section:10} {row.what:34} {verdict:7} {row.figures}", flush=True)
    return {"rows": [asdict(row) for row in rows], "figures": figures, "error": error}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parse.add_argument("--seconds", type=float, default=280, help="no further section is begun after this time")
    parse.add_argument("--dry", action="store_true")
    parse.add_argument("--out", type=Path, help="also write the result as JSON here")
    parse.add_argument("--signs", choices=("fast", "exact"), help=argparse.SUPPRESS)
    asked = parse.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --dry runs the same code on the CPU")
    place = Place(torch.device("cpu" if asked.dry else "cuda:0"), asked.dry, asked.seconds, BEGAN + asked.seconds)
    if asked.signs:
        print(json.dumps([asdict(sign) for sign in run(place, build(place, asked.signs), rows_of(place))]))
        return
    held = conditions(place)
    print(", ".join(f"{k} {v}" for k, v in held.items() if isinstance(v, str)) + (": DRY RUN" if asked.dry else ""))
    sections = {name: section(name, place) for name in asked.only}
    result = {"dry": asked.dry, "conditions": held, "sections": sections, "seconds": elapsed_s()}
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    if any(found["error"] for found in sections.values()):
        raise SystemExit("a section failed")


if __name__ == "__main__":
    main()
