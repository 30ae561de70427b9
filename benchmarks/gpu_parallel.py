"""What parallel training rests on, checked and measured on one GPU: low precision, experts, long rows, exact sums.

    python benchmarks/gpu_parallel.py --out gpu-parallel.json    under 5 minutes
    python benchmarks/gpu_parallel.py --dry                      all of it at a tiny size on the CPU; measures nothing

Needs this repository, torch >= 2.11 and pydantic; truestep need not be installed. Every section stands alone
(`--only fp8` runs one) and gives rows of the table, or one that says what went wrong. `--json` prints JSON instead.

units        units for 8- and 4-bit products that were found, against emulation; bits that must be a CPU's
moe          products of experts: grouped, against a loop
fp8          the model of recipes/llama-1b.toml: tokens/s and loss of each kind of 8 bits against bfloat16, by turns
activations  what is kept for the backward pass, and the peak, of 8 bits against bfloat16
exact        20 steps of exact reduction twice, bit for bit; their time against "fast"
context      peak memory of a step with one row of 32,768 tokens and with the same tokens in rows of 4,096
"""

import argparse
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it at the first product

from gpu_checks import Place, Row, moe, units
from gpu_train import BEGAN, elapsed_s, fresh, log

# isort: split
import torch

from truestep.models.build import build_model, init_weights
from truestep.numerics.batch import Batch
from truestep.numerics.low_precision.units import find_units
from truestep.parallel.job import Job
from truestep.parallel.model import forward
from truestep.recipe.machine import Machine
from truestep.recipe.model import ModelSection
from truestep.recipe.numerics import Numerics
from truestep.recipe.stage import Optim, Schedule, Stage
from truestep.train.build import build
from truestep.train.state import TrainState
from truestep.train.step import train_step

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "llama-1b.toml"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
KINDS = {"fp8-tensorwise": "tensor", "fp8-rowwise": "row", "mxfp8": "mx"}
GIB = 2**30
SPEED_GOAL = 1.25
NO_UNITS = "no units: emulated, not measured"
FP8_SHARE = 0.6  # of the time: then the longest section begins no further round


def made(place: Place, context: int, rows: int, numerics: dict[str, Any] | None = None, **model: Any) -> TrainState:
    shape = tomllib.loads(RECIPE.read_text())["model"] | model | {"max_context": context}
    if place.dry:
        shape |= TINY | {"vocab_size": 512}
    section = ModelSection.model_validate(shape).resolved(shape["vocab_size"])
    optim = Optim(lr=6e-4, weight_decay=0.0, schedule=Schedule(kind="constant", warmup=20))
    tokens = rows * context
    return build(
        Stage(name="b", data="made-up", context=context, tokens=1000 * tokens, batch_tokens=tokens, optim=optim),
        build_model(section, section.vocab_size),
        partial(fill, seed=0),
        job=Job(0, 1, 0, 1, place.device, "none"),
        machine=Machine(microbatch_rows=rows, compile=place.on_cuda),
        precision="bfloat16",
        seed=0,
        steps=1000,
        numerics=Numerics.model_validate(numerics or {}),
    )


def fill(model: torch.nn.Module, pieces: Any, seed: int) -> None:
    init_weights(model, seed, pieces)


def low(kind: str) -> dict[str, Any]:
    return {} if kind == "bf16" else {"low_precision": {"kind": kind}}


def learnable(place: Place, context: int, rows: int, steps: int, lengths: list[int] | None = None) -> list[Batch]:
    """Rows in which four tokens of five follow from the one before by a fixed table. `lengths`: of each row's
    documents; by default a row is one."""
    random = torch.Generator().manual_seed(0)
    kinds, num = (256, steps * rows) if place.dry else (4096, steps * rows)
    table = torch.randperm(kinds, generator=random)
    tokens = torch.randint(kinds, (context + 1, num), generator=random)
    follows = torch.rand(context, num, generator=random) < 0.8
    for t in range(context):
        tokens[t + 1] = torch.where(follows[t], table[tokens[t]], tokens[t + 1])
    x = tokens.t() + 1
    sizes = torch.tensor(lengths or [context])
    documents = torch.arange(len(sizes)).repeat_interleave(sizes).expand(num, -1)
    places = torch.arange(context) - torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))[documents]
    fields = [x[:, :-1], x[:, 1:], places, documents.to(torch.int32)]
    fields = [field.contiguous().pin_memory() if place.on_cuda else field.contiguous() for field in fields]
    return [Batch(*parts) for parts in zip(*(field.split(rows) for field in fields))]


def run_steps(place: Place, state: TrainState, batches: list[Batch]) -> tuple[float, list[float]]:
    """Seconds in all, and the loss of each step."""
    place.sync()
    began = time.perf_counter()
    losses = [train_step(state, [batch], batch.num_targets, []).loss for batch in batches]
    place.sync()
    return time.perf_counter() - began, losses


def contenders(place: Place) -> dict[str, str]:
    """Kinds of 8 bits, and for those that the device has no units for why they are not measured."""
    if place.dry:
        return dict.fromkeys(KINDS, "")
    found = find_units(place.device)
    return {kind: "" if way in found else NO_UNITS for kind, way in KINDS.items()}


def fp8(place: Place, figures: dict[str, Any]) -> Iterator[Row]:
    context, rows, rounds, a_round = (64, 2, 3, 1) if place.dry else (4096, 2, 20, 10)
    batches = learnable(place, context, rows, rounds * a_round)
    log("fp8: rows are made")
    left = contenders(place)
    states = {kind: made(place, context, rows, low(kind)) for kind in ("bf16", *left) if not left.get(kind)}
    log("fp8: states are made; the first round compiles")
    seconds: dict[str, list[float]] = {kind: [] for kind in states}
    losses: dict[str, list[float]] = {kind: [] for kind in states}
    for index in range(rounds):
        if index > 1 and time.perf_counter() > place.until:
            log(f"fp8: no time left after {index} rounds")
            break
        part, names = batches[index * a_round : (index + 1) * a_round], list(states)
        for kind in names[index % len(names) :] + names[: index % len(names)]:
            try:
                took, found = run_steps(place, states[kind], part)
            except Exception as error:
                if kind == "bf16":
                    raise
                left[kind] = said(error)
                del states[kind]
                continue
            seconds[kind].append(took)
            losses[kind] += found
    tokens, num = rows * context * a_round, len(losses["bf16"])
    last = max(2, num // 10)
    plain = losses["bf16"][-last:]
    noise = 2 * stdev(plain) / last**0.5
    figures |= {"steps": num, "seconds": seconds, "losses": losses, "noise": noise, "kinds": {}}
    figures["bf16"] = {"tokens_per_s": tokens / median(seconds["bf16"][1:]), "loss": fmean(plain)}
    speed = f"{figures['bf16']['tokens_per_s']:,.0f} tokens/s, " if not place.dry else ""
    yield Row("fp8", "bf16", f"{speed}loss {losses['bf16'][0]:.3f} to {fmean(plain):.4f} after {num} steps")
    for kind, reason in left.items():
        if reason:
            yield Row("fp8", kind, reason, None if reason == NO_UNITS else False)
            continue
        ratios = [theirs / ours for theirs, ours in zip(seconds["bf16"][1:], seconds[kind][1:])]
        gap = fmean(losses[kind][-last:]) - fmean(plain)  # of steps on the same rows
        figures["kinds"][kind] = {"gap": gap, "ratio": None if place.dry else median(ratios)}
        text = f"bf16 / {kind} {place.times(ratios)}; loss gap {gap:+.4f} (noise {noise:.4f})"
        yield Row("fp8", kind, text, None if place.dry else median(ratios) >= SPEED_GOAL and gap <= noise)


def activations(place: Place, figures: dict[str, Any]) -> Iterator[Row]:
    context, rows, layers = (64, 2, 2) if place.dry else (4096, 2, 8)
    (batch,) = learnable(place, context, rows, 1)
    for kind, reason in {"bf16": "", **contenders(place)}.items():
        if reason:
            yield Row("activations", kind, reason)
            continue
        fresh()
        figures[kind] = kept(place, made(place, context, rows, low(kind), num_layers=layers), batch)
        text = "ran; a CPU does not count its memory"
        if not place.dry:
            text = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in figures[kind].items())
            shares = {name: size / figures["bf16"][name] for name, size in figures[kind].items()}
            text += "".join(f", {share:.2f} of bf16's {name}" for name, share in shares.items())
        yield Row("activations", kind, text)


def kept(place: Place, state: TrainState, batch: Batch) -> dict[str, int]:
    """Bytes beyond weights and gradients: kept by the blocks when the head begins, and at most."""
    parallel, moved, found = state.parallel, batch.to(place.device), {}

    def head(out: Any) -> torch.Tensor:
        found["kept"] = allocated(place)
        return state.loss(out, moved).sum

    for _ in range(2):  # the first time compiles, and makes the gradients
        place.sync()
        static = allocated(place)
        if place.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        with parallel.compute():
            loss = forward(parallel.call, moved, head)
        loss.backward()
        place.sync()
    peak = torch.cuda.max_memory_allocated() if place.on_cuda else 0
    return {"kept": found["kept"] - static, "peak": peak - static}


def allocated(place: Place) -> int:
    return torch.cuda.memory_allocated() if place.on_cuda else 0


def context(place: Place, figures: dict[str, Any]) -> Iterator[Row]:
    long, short = (128, 32) if place.dry else (32768, 4096)
    part = short // 32
    shapes = {
        f"1 row of {long}, 9 documents": (long, 1, [5 * part, *[short] * (long // short - 1), short - 5 * part]),
        f"{long // short} rows of {short}, 2 documents each": (short, long // short, [5 * part, short - 5 * part]),
    }
    for name, (length, rows, lengths) in shapes.items():
        fresh()
        state = made(place, length, rows, num_layers=2, vocab_size=32768)
        batches = learnable(place, length, rows, 3, lengths)
        run_steps(place, state, batches[:1])
        static = allocated(place)
        if place.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        took, _ = run_steps(place, state, batches[1:])
        figures[name] = {"seconds_a_step": took / 2, "peak": None, "static": static}
        text = "ran; a CPU does not count its memory"
        if place.on_cuda:
            figures[name]["peak"] = peak = torch.cuda.max_memory_allocated() - static
            text = f"peak {peak / GIB:.2f} GiB beyond {static / GIB:.2f} static, {took / 2:.3f} s a step"
        yield Row("context", name, text)


def exact(place: Place, figures: dict[str, Any]) -> Iterator[Row]:
    length, rows, layers = (64, 2, 2) if place.dry else (4096, 2, 8)
    steps = 3 if place.dry else 20
    batches = learnable(place, length, rows, steps)
    ways = ("fast", "exact")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    marks: dict[str, list[tuple[str, list[float]]]] = {way: [] for way in ways}
    for replay in range(2):
        states = {way: made(place, length, rows, {"reduction": way}, num_layers=layers) for way in ways}
        losses: dict[str, list[float]] = {way: [] for way in ways}
        for index, batch in enumerate(batches):
            for way in ways if index % 2 else ways[::-1]:
                took, found = run_steps(place, states[way], [batch])
                losses[way] += found
                if index or replay:  # the first step compiles, and of exact reduction is computed twice
                    seconds[way].append(took)
        for way, state in states.items():
            marks[way].append((checksum(state), losses[way]))
        log(f"exact: {steps} steps of both are done")
    ratios = [exactly / fast for exactly, fast in zip(seconds["exact"], seconds["fast"])]
    figures |= {"steps": steps, "seconds": seconds, "runs": marks}
    figures["ratio"] = None if place.dry else median(ratios)
    repeats = {way: first == second for way, (first, second) in marks.items()}
    figures["repeats"] = repeats
    text = f"{steps} steps twice: {'the same bits' if repeats['exact'] else 'DIFFERENT BITS'}"
    text += f" (fast: {'the same' if repeats['fast'] else 'different'}); exact / fast {place.times(ratios)}"
    yield Row("exact", marks["exact"][0][0], text, repeats["exact"])


def checksum(state: TrainState) -> str:
    """Of the bits of all parameters and of the optimizer's state, computed where they are."""
    total = 0
    for name, piece in sorted(state.tensors().items()):
        total = total * 6364136223846793005 + len(name)
        flat = piece.local.detach().reshape(-1)
        if flat.element_size() % 4:
            flat = flat.to(torch.int32)
        for part in flat.view(torch.int32).split(1 << 24):
            odd = torch.arange(1, 2 * len(part), 2, device=part.device)
            total += int((part.long() * odd).sum())
    return f"{total % 2**64:016x}"


SECTIONS: dict[str, Callable[[Place, dict[str, Any]], Iterator[Row]]] = {
    "units": units,
    "moe": moe,
    "fp8": fp8,
    "activations": activations,
    "exact": exact,
    "context": context,
}


def said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def run(name: str, place: Place, show: Callable[[Row], None]) -> dict[str, Any]:
    """One section; what goes wrong in it is a row and stops no other."""
    log(f"{name} begins")
    began, figures, rows = time.perf_counter(), {}, []
    error = None
    fresh()
    try:
        if elapsed_s() > place.seconds:
            raise TimeoutError(f"not begun after {elapsed_s():.0f} s; run it alone: --only {name}")
        for row in SECTIONS[name](place, figures):
            rows.append(asdict(row))
            show(row)
    except Exception as problem:
        error = said(problem)
        log(f"{name} failed")
        sys.excepthook(type(problem), problem, problem.__traceback__)
        show(Row(name, "ERROR", error, False))
    return {"rows": rows, "figures": figures, "error": error, "seconds": time.perf_counter() - began}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parse.add_argument("--seconds", type=float, default=280, help="no further section is begun after this time")
    parse.add_argument("--dry", action="store_true")
    parse.add_argument("--json", action="store_true", help="print JSON and no table")
    parse.add_argument("--out", type=Path, help="also write the JSON here")
    asked = parse.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --dry runs the same code on the CPU")
    device = torch.device("cpu" if asked.dry else "cuda:0")
    place = Place(device, asked.dry, asked.seconds, BEGAN + FP8_SHARE * asked.seconds)
    name = torch.cuda.get_device_name(device) if place.on_cuda else "CPU"

    def show(row: Row) -> None:
        if not asked.json:
            verdict = {True: "ok", False: "MISSED", None: "-"}[row.good]
            print(f"{row.section:12} {row.what:38} {verdict:7} {row.figures}", flush=True)

    if not asked.json:
        print(f"{name}, torch {torch.__version__}{': DRY RUN, nothing is measured' if asked.dry else ''}")
    sections = {section: run(section, place, show) for section in asked.only}
    result = {
        "dry": asked.dry,
        "device": name,
        "capability": torch.cuda.get_device_capability(device) if place.on_cuda else None,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
        "sections": sections,
        "seconds": elapsed_s(),
    }
    text = json.dumps(result, indent=1)
    if asked.json:
        print(text)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text + "\n")
    if any(section["error"] for section in sections.values()):
        raise SystemExit("a section failed")


if __name__ == "__main__":
    main()
