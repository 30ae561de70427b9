"""Goodput under a failure every minute, beside what saves at the best interval would give (Young, Daly).

    python benchmarks/goodput.py            4 ranks, a SIGKILL every 60 s for 20 minutes
    python benchmarks/goodput.py --smoke    2 ranks, one every 10 s for a minute: tries the harness only

Trains a small model on CPU ranks under the supervisor with `checkpoint.every_time = "auto"`, and kills one rank after
the other, each `--every` seconds after the last one and not before the run makes steps again.
"""

import argparse
import tempfile
import time
from pathlib import Path

from harness import machine, save

# isort: split
from truestep.elastic.chaos import Storm
from truestep.elastic.strikes import Row
from truestep.ledger.goodput import goodput
from truestep.ledger.history import collect
from truestep.ledger.words import duration, show
from truestep.recipe.chaos import Chaos, Fault
from truestep.recipe.dump import dump
from truestep.recipe.load import load
from truestep.runlog.log import read

STEP_TOKENS = 3072


def recipe(folder: Path, ranks: int, steps: int) -> dict:
    """A model whose steps take about a tenth of a second on one core a rank."""
    corpus = {"source": "python-stdlib", "holdout": 0.04}
    return {
        "run": {"name": "goodput", "dir": str(folder), "seed": 1},
        "tokenizer": {"kind": "bytes"},
        "data": {"train": corpus | {"split": "train"}},
        "model": {"hidden_size": 64, "intermediate_size": 160, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
        "stages": [
            {
                "name": "base",
                "data": "train",
                "context": 128,
                "batch_tokens": STEP_TOKENS,
                "tokens": STEP_TOKENS * steps,
                "optim": {"lr": 3e-3},
                "gate": {"kind": "none", "reason": "it is a benchmark"},
            }
        ],
        "machine": {
            "processes": ranks,
            "threads": 1,
            "microbatch_rows": 2,
            "device": "cpu",
            "precision": "float32",
            "elastic": {"restarts": 1000},
        },
        "checkpoint": {"drill_every": "0s", "keep": 2},
    }


class Periodic(Storm):
    """Strikes by the clock of progress: the next fault when `every_s` have passed since the last one struck and the run
    makes steps again."""

    every_s = 60.0
    _since: float | None = None

    def _due(self, one, rows: list[Row]) -> bool:
        first = next((planned for planned in self._all if planned.waiting), None)
        if one is not first or not super()._due(one, rows):
            return False
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < self.every_s:
            return False
        self._since = now
        return True

    def _prepare(self):
        self._all = super()._prepare()
        return self._all


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--minutes", type=float, default=20)
    parse.add_argument("--every", type=float, default=60, help="seconds between failures")
    parse.add_argument("--ranks", type=int, default=4)
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--out", type=Path)
    asked = parse.parse_args()
    if asked.smoke:
        asked.minutes, asked.every, asked.ranks = 1, 10, 2
    facts = machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        resolved = load(recipe(folder / "runs", asked.ranks, steps=100_000))
        (folder / "recipe.toml").write_text(dump(resolved))
        kills = int(asked.minutes * 60 / asked.every)
        faults = [Fault(kind="kill", rank=number % asked.ranks, step=1) for number in range(kills)]
        plan = Chaos.model_validate({"faults": faults, "deadline": f"{asked.minutes * 60:g}s"})
        storm = Periodic(resolved, ["run", str(folder / "recipe.toml")], plan)
        storm.every_s = asked.every
        storm.carry_out()
        whole = goodput(collect(read(storm.run_dir)))
    for kind, seconds in sorted(whole.seconds.items(), key=lambda one: -one[1]):
        if seconds:
            print(f"{kind:18} {duration(seconds):>12}  {100 * seconds / whole.wall_s:5.1f} %")
    print(f"failures {whole.failures}, goodput {show(whole.goodput)}, ETTR {show(whole.ettr)}")
    print(f"ideal {show(whole.ideal)}: {whole.ideal.method}")
    figures = {"goodput": whole.goodput.value, "ettr": whole.ettr.value, "ideal": whole.ideal.value}
    settings = {name: value for name, value in vars(asked).items() if name != "out"}
    result = figures | {"failures": whole.failures, "wall_s": whole.wall_s, "seconds": whole.seconds}
    save("goodput", result | {"settings": settings, "machine": facts}, asked.out)


if __name__ == "__main__":
    main()
