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
FIELDS = ("pid", "rank", "beat_ns", "step", "microbatch", "collective", "inside", "section", "section_ns")
"""`beat_ns`: monotonic time of the last sign of life. `collective`: those that were entered in this step; `inside`: 1
while the rank is in one of them. `section_ns`: monotonic time of the beginning of the present section."""
_WIDTH = 64  # int64 of a record; behind FIELDS come the nanoseconds spent in each section so far, and in collectives
_PID, _RANK, _BEAT, _STEP, _MICROBATCH, _COLLECTIVE, _INSIDE, _SECTION, _SINCE = range(len(FIELDS))


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


NAMES = tuple(section.name.lower() for section in SectionOf)
"""Of the sections, in order."""
_SPENT = len(FIELDS)
_WAITED = _SPENT + len(NAMES)


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
        self._inside = _Inside(self._row)
        self._row[:] = 0
        self._row[_PID], self._row[_RANK] = os.getpid(), rank
        self.enter(SectionOf.START)

    @classmethod
    def of(cls, environ: Mapping[str, str], local_rank: int, rank: int) -> "Counters":
        """The record of this process in the file that its launcher made, if there is one."""
        path = environ.get(VARIABLE)
        return cls(Path(path) if path else None, local_rank, rank)

    def enter(self, section: SectionOf) -> None:
        """From here on the rank does something else."""
        row, now = self._row, time.monotonic_ns()
        if row[_SINCE]:
            row[_SPENT + row[_SECTION]] += now - row[_SINCE]
        row[_SECTION], row[_SINCE], row[_BEAT] = section, now, now

    def step(self, step: int) -> None:
        """A step begins."""
        self._row[_COLLECTIVE] = self._row[_MICROBATCH] = 0
        self._set(_STEP, step)

    def microbatch(self, index: int) -> None:
        self._set(_MICROBATCH, index)

    def collective(self) -> "_Inside":
        """One more collective is entered; to be used in `with`, around what keeps this thread waiting."""
        return self._inside

    def spent_s(self) -> dict[str, float]:
        """Seconds in each section so far, the present one up to now, and `waited`: those in collectives."""
        row, now = self._row, time.monotonic_ns()
        spent = row[_SPENT:_WAITED].astype(float)
        spent[row[_SECTION]] += now - row[_SINCE]
        return dict(zip(NAMES, (spent / 1e9).tolist())) | {"waited": float(row[_WAITED]) / 1e9}

    def _set(self, field: int, value: int) -> None:
        self._row[field] = value
        self._row[_BEAT] = time.monotonic_ns()


class _Inside:
    """Around one collective after another; they do not nest."""

    def __init__(self, row: np.ndarray):
        self._row, self._since = row, 0

    def __enter__(self) -> None:
        row, self._since = self._row, time.monotonic_ns()
        row[_COLLECTIVE] += 1
        row[_INSIDE], row[_BEAT] = 1, self._since

    def __exit__(self, *_: object) -> None:
        row, now = self._row, time.monotonic_ns()
        row[_WAITED] += now - self._since
        row[_INSIDE], row[_BEAT] = 0, now


def make(path: Path, ranks: int) -> Path:
    """An empty file of counters for that many local ranks."""
    path.write_bytes(bytes(ranks * _WIDTH * 8))
    return path


def read(path: Path) -> list[dict[str, int]]:
    """The records of all local ranks now; those that have not begun have pid 0. The time spent in each section is under
    its name, that in collectives under "waited", in nanoseconds."""
    table = np.frombuffer(path.read_bytes(), dtype=np.int64).reshape(-1, _WIDTH)
    names = [*FIELDS, *NAMES, "waited"]
    return [dict(zip(names, map(int, row))) for row in table]


def is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended, its parent not having asked perhaps."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"
