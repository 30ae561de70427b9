"""How faults are made from outside a run's processes, without privileges. Torch-free.

A new kind of fault is one more class here, and a name in `STRIKES`. Everything is told by the counters of the ranks
(truestep.runlog.counters), nothing by time, but for how long a fault lasts.
"""

import contextlib
import os
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from truestep.checkpoint.catalogue import read_catalogue, read_manifest
from truestep.elastic.proxy import Line
from truestep.recipe.chaos import Fault
from truestep.storage.local import LocalStore

PERIOD_S = 0.1
"""Of the stopping and going on of a slow process."""


@dataclass(frozen=True)
class Ground:
    """What there is to break. `stores`: folders of checkpoints, one a stage. `lines`: by host."""

    stores: Sequence[Path]
    lines: Mapping[str, Line] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A rank that lives."""

    pid: int
    rank: int
    step: int


class Strike(ABC):
    """One fault. `lasts`: it goes on for a while."""

    lasts = False

    def __init__(self, fault: Fault, ground: Ground):
        self.fault, self.ground = fault, ground

    @abstractmethod
    def begin(self, rows: Sequence[Row]) -> str | None:
        """Make the fault; or why that cannot be done yet."""

    def go_on(self, rows: Sequence[Row]) -> bool:
        """Called again and again while the fault lasts; False when it is over."""
        return False

    def end(self) -> None:
        """Undo what does not go away by itself. The processes may be gone."""
        return

    def at_s(self) -> float:
        """Unix time at which it struck."""
        return time.time()

    def mine(self, rows: Sequence[Row]) -> list[Row]:
        """The ranks that are meant."""
        return [row for row in rows if self.fault.rank in (None, row.rank)]


class Kill(Strike):
    """SIGKILL."""

    def begin(self, rows: Sequence[Row]) -> str | None:
        return None if all([_signal(row.pid, signal.SIGKILL) for row in self.mine(rows)]) else "the process is gone"


class Stop(Strike):
    """SIGSTOP, and SIGCONT later."""

    lasts = True

    def begin(self, rows: Sequence[Row]) -> str | None:
        self._pids = [row.pid for row in self.mine(rows)]
        self._until = time.monotonic() + self.fault.seconds
        return None if all([_signal(pid, signal.SIGSTOP) for pid in self._pids]) else "the process is gone"

    def go_on(self, rows: Sequence[Row]) -> bool:
        return time.monotonic() < self._until

    def end(self) -> None:
        for pid in self._pids:
            _signal(pid, signal.SIGCONT)


class Slow(Strike):
    """Stopped for a part of every PERIOD_S, so that all that the process does takes `factor` times as long."""

    lasts = True

    def begin(self, rows: Sequence[Row]) -> str | None:
        self._row = max(self.mine(rows), key=lambda row: row.step)  # one that is sent home may live on for a moment
        self._since, self._stopped = time.monotonic(), False
        return None

    def go_on(self, rows: Sequence[Row]) -> bool:
        row = next((row for row in rows if row.pid == self._row.pid), None)
        if row is None or row.step >= self._row.step + self.fault.steps:
            return False
        phase = (time.monotonic() - self._since) % PERIOD_S
        stop = phase > PERIOD_S / self.fault.factor
        if stop != self._stopped:
            self._stopped = stop
            _signal(row.pid, signal.SIGSTOP if stop else signal.SIGCONT)
        return True

    def end(self) -> None:
        _signal(self._row.pid, signal.SIGCONT)


class Flip(Strike):
    """Carried out within the workers (truestep.sentinel.inject), where a bit can be reached; here it is awaited: `note`
    is the file in which the injector notes that it did."""

    note: Path | None = None

    def begin(self, rows: Sequence[Row]) -> str | None:
        return None if self.note is not None and self.note.exists() else "the run did not get to it"

    def at_s(self) -> float:
        assert self.note is not None
        return self.note.stat().st_mtime

    @property
    def host(self) -> str | None:
        return self.note.read_text() or None if self.note is not None and self.note.exists() else None


class Corrupt(Strike):
    """One bit of the largest object of the newest checkpoint."""

    def begin(self, rows: Sequence[Row]) -> str | None:
        for folder in reversed(self.ground.stores):
            store = LocalStore(folder)
            commits = read_catalogue(store).commits if folder.is_dir() else []
            if commits:
                objects = read_manifest(store, commits[-1]).objects
                return self._flip(folder / max(objects, key=lambda key: (objects[key].size, key)))
        return "there is no checkpoint"

    def _flip(self, file: Path) -> None:
        at, bit = self.fault.element % file.stat().st_size, self.fault.bit % 8
        os.chmod(file, 0o600)
        with file.open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << bit]))


class Fill(Strike):
    """RLIMIT_FSIZE of the processes: what a full quota does to them (writes are cut short, then refused with EFBIG),
    and to nobody else on the machine."""

    lasts = True

    def begin(self, rows: Sequence[Row]) -> str | None:
        self._before: dict[int, tuple[int, int]] = {}
        self._until = time.monotonic() + self.fault.seconds
        self._limit(rows)
        return None if self._before else "the process is gone"

    def go_on(self, rows: Sequence[Row]) -> bool:
        self._limit(rows)  # of processes that have come since, too
        return time.monotonic() < self._until

    def end(self) -> None:
        for pid, limits in self._before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    def _limit(self, rows: Sequence[Row]) -> None:
        for row in self.mine(rows):
            if row.pid not in self._before:
                with contextlib.suppress(ProcessLookupError):
                    soft, hard = resource.prlimit(row.pid, resource.RLIMIT_FSIZE)
                    resource.prlimit(row.pid, resource.RLIMIT_FSIZE, (self.fault.bytes, hard))
                    self._before[row.pid] = soft, hard


class Partition(Strike):
    """The line between a machine and its supervisor is a black hole."""

    lasts = True

    def begin(self, rows: Sequence[Row]) -> str | None:
        assert self.fault.host is not None
        self._until = time.monotonic() + self.fault.seconds
        self.ground.lines[self.fault.host].cut()
        return None

    def go_on(self, rows: Sequence[Row]) -> bool:
        return time.monotonic() < self._until

    def end(self) -> None:
        self.ground.lines[str(self.fault.host)].mend()


STRIKES: dict[str, type[Strike]] = {
    "kill": Kill,
    "stop": Stop,
    "slow": Slow,
    "flip": Flip,
    "corrupt": Corrupt,
    "fill": Fill,
    "partition": Partition,
}


def _signal(pid: int, number: int) -> bool:
    """Send a signal; False if the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
