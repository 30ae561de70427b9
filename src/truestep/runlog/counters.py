"""How far each rank of a host is, in shared memory: written by the workers, read from outside, also when one hangs.

A file of one record a local rank (FIELDS, int64 each). A worker writes its own record and nothing else, so there is no
lock; a reader may see the fields of two moments mixed, which is harmless for a watcher.
"""

import mmap
import os
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

import numpy as np

VARIABLE = "TRUESTEP_COUNTERS"
FIELDS = ("pid", "rank", "beat_ns", "step", "microbatch", "collective", "section", "section_ns")
"""`beat_ns`: monotonic time of the last sign of life. `section_ns`: of the beginning of the present section."""
_WIDTH = 64  # int64 of a record; behind FIELDS come the nanoseconds spent in each section so far


class SectionOf(IntEnum):
    """What a rank is doing."""

    START = 0
    DATA = 1
    COMPUTE = 2
    REDUCE = 3
    UPDATE = 4
    SAVE = 5
    EVALUATE = 6
    OTHER = 7


class Counters:
    """One rank's record. Without a file (nobody watches) all calls do nothing but count in memory."""

    def __init__(self, path: Path | None = None, local_rank: int = 0, rank: int = 0):
        if path is None:
            self._row = np.zeros(_WIDTH, dtype=np.int64)
        else:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
            table = np.frombuffer(self._map, dtype=np.int64).reshape(-1, _WIDTH)
            self._row = table[local_rank]
        self._row[:] = 0
        self._row[FIELDS.index("pid")], self._row[FIELDS.index("rank")] = os.getpid(), rank
        self.enter(SectionOf.START)

    @classmethod
    def of(cls, environ: Mapping[str, str], local_rank: int, rank: int) -> "Counters":
        """The record of this process in the file that its launcher made, if there is one."""
        path = environ.get(VARIABLE)
        return cls(Path(path) if path else None, local_rank, rank)

    def enter(self, section: SectionOf) -> None:
        """From here on the rank does something else."""
        row, now = self._row, time.monotonic_ns()
        at, since = FIELDS.index("section"), FIELDS.index("section_ns")
        if row[since]:
            row[len(FIELDS) + row[at]] += now - row[since]
        row[at], row[since], row[FIELDS.index("beat_ns")] = section, now, now

    def step(self, step: int) -> None:
        """A step begins."""
        self._set("step", step)
        self._set("microbatch", 0)

    def microbatch(self, index: int) -> None:
        self._set("microbatch", index)

    def collective(self) -> None:
        """One more collective is entered."""
        self._row[FIELDS.index("collective")] += 1
        self._row[FIELDS.index("beat_ns")] = time.monotonic_ns()

    def _set(self, field: str, value: int) -> None:
        self._row[FIELDS.index(field)] = value
        self._row[FIELDS.index("beat_ns")] = time.monotonic_ns()


def make(path: Path, ranks: int) -> Path:
    """An empty file of counters for that many local ranks."""
    path.write_bytes(bytes(ranks * _WIDTH * 8))
    return path


def read(path: Path) -> list[dict[str, int]]:
    """The records of all local ranks now; those that have not begun have pid 0. `seconds of` sections are under their
    names, in nanoseconds."""
    table = np.frombuffer(path.read_bytes(), dtype=np.int64).reshape(-1, _WIDTH)
    names = [*FIELDS, *(section.name.lower() for section in SectionOf)]
    return [dict(zip(names, map(int, row))) for row in table]
