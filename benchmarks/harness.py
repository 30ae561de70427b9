"""What the benchmarks share: shapes, made-up data, timing by turns, memory, tables and JSON.

Import it before torch: threads that wait must sleep (OMP_WAIT_POLICY), or a busy neighbour slows every step 3-5 times.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "out"
sys.path.insert(0, str(ROOT))  # tests/: forked ranks, sparse stores

SHAPES: dict[str, dict[str, Any]] = {
    "30m-32k": {"vocab_size": 32000, "hidden_size": 384, "intermediate_size": 1024, "num_layers": 10, "num_heads": 6},
    "30m-4k": {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_layers": 9, "num_heads": 8},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "num_heads": 4},
}
"""Llama shapes with tied embeddings. The first two have 30.0 and 31.0 million parameters; in the first the head has two
fifths of the work, in the second hardly a fifteenth."""


def model_section(shape: str):
    """The resolved [model] section of a shape."""
    from truestep.recipe.model import ModelSection

    return ModelSection(**SHAPES[shape], tie_embeddings=True, max_context=4096).resolved(SHAPES[shape]["vocab_size"])


def made_up_store(path: Path, vocab_size: int, num_tokens: int, document_tokens: int, seed: int = 0):
    """A token store of documents of one length (their end counted) with ids of a skewed distribution."""
    from truestep.data.store import StoreWriter

    random = np.random.default_rng(seed)
    with StoreWriter(path, vocab_size, 0) as writer:
        for _ in range(-(-num_tokens // document_tokens)):
            ids = 1 + (random.random(document_tokens - 1) ** 4 * (vocab_size - 1)).astype(np.int64)
            writer.append(ids, document_tokens)
        return writer.finish({})


def scratch() -> tempfile.TemporaryDirectory:
    """A folder for what a benchmark writes, on the disk of the repository; gone at the end."""
    OUT.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=OUT, prefix="scratch-")


def by_turns(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Results of `rounds` rounds in each of which every contender goes once; each round begins with another one."""
    names, found = list(contenders), {name: [] for name in contenders}
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            found[name].append(contenders[name]())
    return found


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median, least and largest of the ratios round by round: what the machine does to both in a round cancels."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


class Clock:
    """Wall and CPU seconds (of all threads of this process) since it was made."""

    def __init__(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.cpu}


def peak_bytes() -> int:
    """Largest resident set that this program ever had (getrusage's would count its parent's before the exec)."""
    return _status()["VmHWM"]


def _status() -> dict[str, int]:
    """Sizes in /proc/self/status, in bytes."""
    fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words[-1] == "kB"}


def resident_bytes() -> dict[str, int]:
    """Resident memory now: `anonymous` is the process's own, `file` are mapped pages that the kernel may drop."""
    sizes = _status()
    return {"anonymous": sizes["RssAnon"], "file": sizes["RssFile"]}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    packages = {name: version(name) for name in ("torch", "numpy", "truestep")}
    cpu = "unknown"
    if (info := Path("/proc/cpuinfo")).exists():
        models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0] if models else cpu
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": packages,
        "commit": commit,
        "omp_wait_policy": os.environ["OMP_WAIT_POLICY"],
    }


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()) -> None:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:,.4g}" for value in row))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def save(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Write benchmarks/out/NAME.json (or `out`) and say where."""
    path = out or OUT / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")
    return path
