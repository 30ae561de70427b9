"""Training speed and memory of truestep's whole loop beside transformers.Trainer and loops written by hand.

    python benchmarks/train.py                     30M parameters, vocabulary 32,000, about 10 minutes on 2 cores
    python benchmarks/train.py --shape 30m-4k      a small vocabulary, where the fused head gains little
    python benchmarks/train.py --compile           all of them compiled
    python benchmarks/train.py --smoke             a tiny shape, under a minute: tries the harness, measures nothing

Every contender lives in a process of its own and sleeps while another is on. Rounds go A B C D, B C D A, ...; ratios
are taken round by round. After the timed rounds each does one more under torch's profiler, to say where the time goes.
"""

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import by_turns, machine, made_up_store, median, model_section, ratio, save, scratch, show

# isort: split
from contenders import CONTENDERS, Spec

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::_addmm_activation"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "cross-entropy": ("log_softmax", "nll_loss", "aten::gather", "aten::scatter", "_LinearCrossEntropy"),
    "optimizer": ("_fused_adamw", "Optimizer."),
    "norms, clipping": ("_foreach", "vector_norm", "linalg"),
    "copies": ("aten::copy_", "aten::cat", "aten::fill_", "aten::zero_", "aten::clone"),
    "compiled kernels": ("Torch-Compiled", "graph_", "CompiledFunction"),
}


class Contender:
    """A process that does one round when asked to."""

    def __init__(self, name: str, spec: Any, log: Path, script: str = "contenders.py"):
        self.name = name
        command = [sys.executable, str(Path(__file__).with_name(script)), name, json.dumps(asdict(spec))]
        self.log = log.open("w")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(command, text=True, **pipes)
        self.answer()

    def round(self, command: str = "go") -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early:\n{Path(self.log.name).read_text()[-3000:]}")
        return json.loads(line)

    def __enter__(self) -> "Contender":
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        if any(error):
            self.process.kill()
        self.process.wait()
        self.log.close()


def compete(spec: Spec, names: list[str], folder: Path) -> dict[str, Any]:
    """All rounds of all contenders: raw answers by name, and the answers under the profiler."""
    with ExitStack() as stack:
        runners = {n: stack.enter_context(Contender(n, spec, folder / f"{n}.log")) for n in names}
        for runner in runners.values():
            runner.round()  # warm-up
        rounds = by_turns({name: runner.round for name, runner in runners.items()}, spec.rounds)
        return {"rounds": rounds, "profiles": {name: runner.round("profile") for name, runner in runners.items()}}


def summary(spec: Spec, found: dict[str, Any]) -> dict[str, Any]:
    """Medians, and ratios of truestep's to the others'."""
    tokens = spec.steps * spec.rows_a_step * spec.context
    speeds = {n: [tokens / answer["seconds"] for answer in answers] for n, answers in found["rounds"].items()}
    cpu = {n: [answer["cpu_seconds"] for answer in answers] for n, answers in found["rounds"].items()}
    peaks = {name: answers[-1]["peak_bytes"] for name, answers in found["rounds"].items()}
    contenders = {
        name: {
            "tokens_per_s": median(speeds[name]),
            "tokens_per_cpu_s": tokens / median(cpu[name]),
            "peak_bytes": peaks[name],
            "losses": [answer["loss"] for answer in found["rounds"][name]],
            "rounds_s": [answer["seconds"] for answer in found["rounds"][name]],
            "where_s_per_step": where(found["profiles"][name], spec.steps),
        }
        for name in speeds
    }
    others = [name for name in speeds if name != "truestep"]
    return {
        "contenders": contenders,
        "speed_ratio": {name: ratio(speeds["truestep"], speeds[name]) for name in others},
        "cpu_ratio": {name: ratio(cpu[name], cpu["truestep"]) for name in others},
        "memory_ratio": {name: peaks["truestep"] / peaks[name] for name in others},
        "loss_spread": spread([contenders[name]["losses"] for name in contenders]),
    }


def spread(losses: list[list[float]]) -> float:
    """Largest relative difference between contenders in any round. Trainer rounds its losses to four digits."""
    return max((max(row) - min(row)) / min(row) for row in zip(*losses))


def where(profiled: dict[str, Any], steps: int) -> dict[str, float]:
    """Seconds a step by kind of operator; what no operator accounts for is Python, and waiting."""
    left, kinds = dict(profiled["operators"]), {}
    for kind, words in KINDS.items():
        mine = [name for name in left if any(word in name for word in words)]
        kinds[kind] = sum(left.pop(name) for name in mine) / steps
    kinds["other operators"] = sum(left.values()) / steps
    kinds["outside operators"] = max(0.0, profiled["seconds"] / steps - sum(kinds.values()))
    return kinds


def report(result: dict[str, Any]) -> None:
    contenders = result["contenders"]
    rows = []
    for name, figures in contenders.items():
        ratios = [result[key].get(name) for key in ("speed_ratio", "cpu_ratio", "memory_ratio")]
        speed, cpu = (f"{r['median']:.3f} ({r['min']:.3f}-{r['max']:.3f})" if r else "" for r in ratios[:2])
        memory = f"{ratios[2]:.3f}" if ratios[2] else ""
        mib = figures["peak_bytes"] / 2**20
        rows.append([name, figures["tokens_per_s"], figures["tokens_per_cpu_s"], mib, speed, cpu, memory])
    title = f"{result['parameters'] / 1e6:.1f}M parameters, {result['settings']['shape']}, fp32"
    title += ", compiled" if result["settings"]["compile"] else ", eager"
    columns = [
        "loop",
        "tokens/s",
        "tokens/CPU-s",
        "peak MiB",
        "truestep is x times as fast",
        "by CPU-seconds",
        "memory",
    ]
    show(title, columns, rows, [f"largest relative difference of losses: {result['loss_spread']:.1e}"])
    kinds = list(next(iter(contenders.values()))["where_s_per_step"])
    table = [[kind, *(figures["where_s_per_step"][kind] for figures in contenders.values())] for kind in kinds]
    show("where a step's seconds go (under the profiler)", ["", *contenders], table)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--shape", default="30m-32k", choices=["30m-32k", "30m-4k", "tiny"])
    parse.add_argument("--context", type=int, default=512, help="tokens in a row")
    parse.add_argument("--document-tokens", type=int, help="length of documents; by default a row")
    parse.add_argument("--rows", type=int, default=8, help="rows in a microbatch")
    parse.add_argument("--accumulate", type=int, default=1, help="microbatches in a step")
    parse.add_argument("--steps", type=int, default=2, help="steps in a round; truestep saves once in each")
    parse.add_argument("--rounds", type=int, default=5)
    parse.add_argument("--threads", type=int, default=2)
    parse.add_argument("--compile", action="store_true", help="compile every contender (blocks, or the whole model)")
    parse.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--out", type=Path, help="the JSON file; by default benchmarks/out/train-SHAPE.json")
    asked = parse.parse_args()
    if asked.smoke:
        asked.shape, asked.context, asked.rows, asked.rounds = "tiny", 32, 4, 2
    if "truestep" not in asked.only:
        parse.error("--only must name truestep: the ratios are its")
    # truestep saves after each step that is a multiple of `steps`; with this warm-up that is the middle of a round
    warmup = asked.steps + asked.steps // 2
    with scratch() as name:
        folder = Path(name)
        length, vocab_size = asked.document_tokens or asked.context, model_section(asked.shape).vocab_size
        num_steps = warmup + asked.steps * (asked.rounds + 1)
        made_up_store(folder / "store", vocab_size, asked.rows * asked.accumulate * num_steps * asked.context, length)
        spec = Spec(
            asked.shape,
            str(folder / "store"),
            asked.context,
            asked.rows,
            asked.accumulate,
            warmup,
            asked.steps,
            asked.rounds,
            asked.threads,
            asked.compile,
        )
        facts = machine()
        result = summary(spec, compete(spec, asked.only, folder))
    result |= {"settings": asdict(spec), "parameters": model_section(asked.shape).counts().total, "machine": facts}
    report(result)
    save(f"train-{asked.shape}{'-compiled' if asked.compile else ''}", result, asked.out)
    if result["loss_spread"] > 0.01:
        raise SystemExit("the contenders' losses differ by more than 1 %, so they did not do the same work")


if __name__ == "__main__":
    main()
