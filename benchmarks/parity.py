"""The parity table: how far compositions of parallel axes are from plain autograd in one process.

    python benchmarks/parity.py                  the fixed set of the tests, 7 minutes on 2 cores
    python benchmarks/parity.py --every 2 --steps 2    half of it, two optimizer steps
    python benchmarks/parity.py --random 1000    so many random ones besides
    python benchmarks/parity.py --smoke          five

One row for each set of axes. Errors are the largest of |a - b| / max |b| over all gradients of the first step, before
clipping and optimizer; b is float64 on one process. "plain float32" is what one process makes of it in float32 by
plain autograd with its rows in other orders: where terms of a gradient cancel, nobody does better. "weights" are
compared after all steps (ten) of SGD in float64, "AdamW" after as many of that.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import machine, save, show

# isort: split
from tests.parallel import oracle
from tests.parallel.compositions import Composition, draw, fixed_set, meshes, refusals
from tests.parallel.harness import Report, check
from tests.pool import Pool, RankError


@dataclass
class Row:
    """What was found of one set of axes."""

    number: int = 0
    float64: float = 0.0
    float32: float = 0.0
    plain32: float = 0.0
    weights: float = 0.0
    adamw: float = 0.0
    reloads: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def figures(self) -> tuple[float, ...]:
        return self.float64, self.float32, self.plain32, self.weights, self.adamw

    def add(self, report: Report) -> None:
        one = report.composition
        self.number += 1
        self.reloads += report.same_bits is not None
        if one.precision == "float32":
            self.float32 = max(self.float32, report.gradient[0])
            self.plain32 = max(self.plain32, max(oracle.rounding(one).values()))
        elif one.optimizer == "adamw":
            self.float64, self.adamw = max(self.float64, report.gradient[0]), max(self.adamw, report.weight[0])
        else:
            self.float64, self.weights = max(self.float64, report.gradient[0]), max(self.weights, report.weight[0])
        self.faults += [f"{one}: {fault}" for fault in report.faults()]


def measure(compositions: Sequence[Composition], steps: int) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    with Pool() as pool, tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(compositions):
            row = rows.setdefault(one.kind, Row())
            try:
                row.add(check(pool, one, Path(folder) / str(number), steps=steps))
            except (RankError, TimeoutError) as error:
                row.faults.append(f"{one}: {str(error).splitlines()[-1]}")
    return dict(sorted(rows.items(), key=lambda item: (item[0].count(" x "), item[0])))


def chosen(every: int, number: int, seed: int) -> list[Composition]:
    """One in `every` of the fixed set, and random ones."""
    found = list(fixed_set())[::every]
    source = random.Random(seed)
    while number:
        one = draw(source.choice, source.choice(meshes(source.choice([2, 3, 4, 6, 8]))))
        if not refusals(one):
            found.append(replace(one, seed=source.randrange(10**6)))
            number -= 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="five compositions of two steps")
    parser.add_argument("--every", type=int, default=1, help="take one in so many of the fixed set")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--random", type=int, default=0, help="random compositions besides the fixed set")
    parser.add_argument("--seed", type=int, default=0, help="of the random ones")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    began, before = time.perf_counter(), machine()
    compositions = chosen(50 if asked.smoke else asked.every, asked.random, asked.seed)
    rows = measure(compositions, steps=2 if asked.smoke else asked.steps)
    faults = [fault for row in rows.values() for fault in row.faults]
    seconds = time.perf_counter() - began
    show(
        f"largest relative error of a gradient, {len(compositions)} compositions",
        ["axes", "tried", "float64", "float32", "plain float32", "weights", "AdamW"],
        [[kind, str(row.number), *(f"{x:.1e}" if x else "" for x in row.figures)] for kind, row in rows.items()],
        [f"{len(faults)} faults, {seconds:.0f} s", *faults],
    )
    result = {"machine": before, "seconds": seconds, "rows": {kind: vars(row) for kind, row in rows.items()}}
    save("parity", result, asked.out)


if __name__ == "__main__":
    main()
