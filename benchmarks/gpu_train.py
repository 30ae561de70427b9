"""Tokens per second and MFU of truestep's own training step on one GPU: a Llama of about 1B parameters, bf16, compiled.

    python benchmarks/gpu_train.py          under 5 minutes; prints JSON
    python benchmarks/gpu_train.py --dry    the same code at a size for CPUs, in seconds; measures nothing

Needs this repository, torch >= 2.11 and pydantic; truestep need not be installed. Rows are made up, in page-locked
memory as the loader leaves them, and each holds one document unless --documents says otherwise. It finds the largest
microbatch that fits, then tries what may help (larger chunks of the head, cuDNN's attention) and reports every try and
the best.
MFU is by the recipe's counting rule, with causal attention and, beside it, full attention.
"""

import argparse
import gc
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # tries of several sizes leave no holes

import torch
import torch.nn.attention

from truestep.factors.devices import device_peak
from truestep.losses.cross_entropy import CrossEntropy
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.numerics.batch import Batch
from truestep.parallel.job import Job
from truestep.recipe.machine import Machine
from truestep.recipe.model import COUNTING_RULE, ModelSection
from truestep.recipe.stage import Stage
from truestep.train.build import build
from truestep.train.state import TrainState
from truestep.train.step import train_step

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "rope_theta": 500000.0,
        "tie_embeddings": True,
    },
    "tinyllama-1.1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_layers": 22,
        "num_heads": 32,
        "num_kv_heads": 4,
    },
    "dry": {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
}
MOST_ROWS = 8
BIG_CHUNK = 8192
BEGAN = time.perf_counter()


def elapsed_s() -> float:
    return time.perf_counter() - BEGAN


def log(text: str) -> None:
    print(f"[{elapsed_s():6.1f} s] {text}", file=sys.stderr, flush=True)


def made_up_rows(vocab_size: int, context: int, rows: int, documents: int, pin: bool) -> Batch:
    """Rows of `documents` equally long documents each."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, vocab_size, (rows, context + 1), generator=random)
    length = -(-context // documents)
    place = torch.arange(context).expand(rows, context)
    fields = (tokens[:, :-1], tokens[:, 1:], place % length, (place // length).to(torch.int32))
    return Batch(*(x.contiguous().pin_memory() if pin else x.contiguous() for x in fields))


def make_state(asked: argparse.Namespace, rows: int, device: torch.device, precision: str) -> TrainState:
    section = ModelSection(**SHAPES[asked.shape], max_context=asked.context).resolved(SHAPES[asked.shape]["vocab_size"])
    tokens = rows * asked.context
    stage = Stage(name="bench", data="made-up", context=asked.context, tokens=10_000 * tokens, batch_tokens=tokens)
    return build(
        stage,
        build_model(section, section.vocab_size),
        lambda model, pieces: init_weights(model, 0, pieces),
        job=Job(0, 1, 0, 1, device, "none"),
        machine=Machine(
            microbatch_rows=rows,
            compile=asked.compile,
            activation_checkpointing=asked.activation_checkpointing,
            head_chunk_tokens=asked.head_chunk,
        ),
        precision=precision,
        seed=0,
        steps=10_000,
    )


def section_of(state: TrainState) -> ModelSection:
    model = state.parallel.bare
    assert isinstance(model, Decoder)
    return model.section


def steps(state: TrainState, batch: Batch, accumulate: int, count: int) -> list[float]:
    """Seconds of each of `count` steps. A step ends with numbers on the host, so no further synchronisation is needed
    but for its optimizer, which the last one waits for."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        train_step(state, [batch] * accumulate, accumulate * batch.num_targets, [])
        if state.parallel.device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return took


def fitting(asked: argparse.Namespace, device: torch.device, precision: str) -> tuple[TrainState, Batch]:
    """The state and the largest microbatch that train two steps without running out of memory."""
    rows = asked.rows or MOST_ROWS
    while (found := attempt_rows(asked, rows, device, precision)) is None:
        if rows == 1 or asked.rows:
            raise SystemExit(f"{rows} rows of {asked.context} do not fit; try --activation-checkpointing full")
        rows //= 2
        log(f"out of memory; trying {rows} rows")
        fresh()
    return found


def attempt_rows(
    asked: argparse.Namespace, rows: int, device: torch.device, precision: str
) -> tuple[TrainState, Batch] | None:
    vocab_size = SHAPES[asked.shape]["vocab_size"]
    batch = made_up_rows(vocab_size, asked.context, rows, asked.documents, pin=device.type == "cuda")
    try:
        state = make_state(asked, rows, device, precision)
        log(f"built; two steps with microbatches of {rows} rows{' (compiling)' if asked.compile else ''}")
        log(f"they took {', '.join(f'{s:.1f} s' for s in steps(state, batch, asked.accumulate, 2))}")
    except torch.OutOfMemoryError:
        return None
    return state, batch


def fresh() -> None:
    """Forget compiled code (a new number of rows would else be compiled as a dynamic shape) and free memory."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(
    state: TrainState, batch: Batch, asked: argparse.Namespace, peak: float | None, name: str
) -> dict[str, Any]:
    """One try: a few steps to settle, then the timed ones."""
    if state.parallel.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    settle = steps(state, batch, asked.accumulate, 3)
    timed = sorted(steps(state, batch, asked.accumulate, asked.steps))
    section = section_of(state)
    tokens = batch.tokens_BT.numel() * asked.accumulate
    length = -(-asked.context // asked.documents)
    step_s = timed[len(timed) // 2]
    flops = {kind: section.train_flops(tokens, length, causal=kind == "causal") for kind in ("causal", "full")}
    found = {
        "try": name,
        "step_s": step_s,
        "step_s_all": timed,
        "tokens_per_s": tokens / step_s,
        "tflops_per_s": {kind: value / step_s / 1e12 for kind, value in flops.items()},
        "mfu": {kind: value / step_s / peak for kind, value in flops.items()} if peak else None,
        "first_step_s": settle[0],
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }
    shown = f", MFU {found['mfu']['causal']:.3f}" if found["mfu"] else ""
    log(f"{name}: {found['tokens_per_s']:,.0f} tokens/s{shown}")
    return found


def tries(state: TrainState, batch: Batch, asked: argparse.Namespace, peak: float | None) -> list[dict[str, Any]]:
    """The defaults, then one change after the other, each kept if it helped; none is begun when time is up."""
    found = [measure(state, batch, asked, peak, "defaults")]

    def attempt(name: str, change: Any, undo: Any) -> None:
        if elapsed_s() > asked.seconds:
            return log(f"no time left for: {name}")
        change()
        try:
            found.append(measure(state, batch, asked, peak, name))
        except torch.OutOfMemoryError:
            log(f"{name}: out of memory")
            state.optimizer.zero_grad()
            state.parallel.probe.take()
        if found[-1]["try"] != name or found[-1]["step_s"] > min(f["step_s"] for f in found):
            undo()

    loss = state.loss
    assert isinstance(loss, CrossEntropy)
    big = f"head chunks of {BIG_CHUNK} tokens"
    attempt(big, lambda: set_loss(state, replace(loss, chunk_tokens=BIG_CHUNK)), lambda: set_loss(state, loss))
    if state.parallel.device.type == "cuda" and asked.documents == 1:
        kernels = ExitStack()
        attempt("attention by cuDNN", lambda: prefer_cudnn(kernels), lambda: stop_preferring(kernels))
    return found


def set_loss(state: TrainState, loss: CrossEntropy) -> None:
    state.loss = loss


def prefer_cudnn(kernels: ExitStack) -> None:
    """Take cuDNN's attention before the others (which one is first by itself depends on torch and cuDNN). Compiled code
    has the choice built in, so it is compiled again."""
    torch._dynamo.reset()
    backend = torch.nn.attention.SDPBackend
    order = [backend.CUDNN_ATTENTION, backend.FLASH_ATTENTION, backend.EFFICIENT_ATTENTION, backend.MATH]
    kernels.enter_context(torch.nn.attention.sdpa_kernel(order, set_priority=True))


def stop_preferring(kernels: ExitStack) -> None:
    torch._dynamo.reset()
    kernels.close()


def profile(state: TrainState, batch: Batch, accumulate: int) -> list[dict[str, Any]]:
    """Where one step's device time goes: the kernels (operators, on a CPU) that take most, in milliseconds."""
    cuda = state.parallel.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if cuda else [])]) as profiled:
        steps(state, batch, accumulate, 1)
    spent = [(e.self_device_time_total if cuda else e.self_cpu_time_total, e) for e in profiled.key_averages()]
    top = sorted(spent, key=lambda pair: -pair[0])[:15]
    return [{"name": e.key[:90], "ms": us / 1e3, "calls": e.count} for us, e in top if us]


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--shape", default="llama-3.2-1b", choices=list(SHAPES))
    parse.add_argument("--context", type=int, default=4096)
    parse.add_argument(
        "--rows", type=int, default=0, help=f"rows in a microbatch; 0 takes the most that fit, up to {MOST_ROWS}"
    )
    parse.add_argument("--accumulate", type=int, default=1, help="microbatches in a step")
    parse.add_argument("--documents", type=int, default=1, help="documents in a row; above 1 attention takes masks")
    parse.add_argument(
        "--head-chunk", type=int, default=Machine().head_chunk_tokens, help="tokens at a time in the head"
    )
    parse.add_argument("--activation-checkpointing", default="none", choices=["none", "selective", "full"])
    parse.add_argument("--eager", dest="compile", action="store_false", help="do not compile the blocks")
    parse.add_argument("--steps", type=int, default=10, help="timed steps of each try")
    parse.add_argument("--seconds", type=float, default=200, help="no further try is begun after this time")
    parse.add_argument("--dry", action="store_true")
    parse.add_argument("--out", type=Path, help="also write the JSON here")
    asked = parse.parse_args()
    if asked.dry:
        asked.shape, asked.context, asked.rows, asked.steps, asked.compile = "dry", 64, 2, 2, False
    device = torch.device("cpu" if asked.dry else "cuda:0")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --dry runs the same code on the CPU")
    precision = "float32" if asked.dry else "bfloat16"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = device_peak(name, precision)
    if known is None:
        log(f"the peak of {name!r} is not known, so MFU is not recorded")
    state, batch = fitting(asked, device, precision)
    found = tries(state, batch, asked, known.flops if known else None)
    best = max(found, key=lambda one: one["tokens_per_s"])
    result = {
        "device": name,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
        "parameters": section_of(state).counts().total,
        "shape": asked.shape,
        "context": asked.context,
        "documents_a_row": asked.documents,
        "microbatch_rows": len(batch.tokens_BT),
        "accumulate": asked.accumulate,
        "precision": precision,
        "compiled": asked.compile,
        "activation_checkpointing": asked.activation_checkpointing,
        "peak": {"flops": known.flops, "source": known.source} if known else None,
        "flops_rule": COUNTING_RULE,
        "tries": found,
        "best": best,
        "profile": profile(state, batch, asked.accumulate),
        "seconds": elapsed_s(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
