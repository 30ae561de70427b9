"""Drills of a run's own checkpoints while it trains: rank 0 starts `truestep drill` beside it, one at a time."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from truestep.errors import CheckpointError, StorageError
from truestep.parallel.environment import outside
from truestep.runlog.log import read
from truestep.runlog.records import AttemptStart, Drill, Record
from truestep.sentinel.alarm import Alarm
from truestep.stages.again import trusted
from truestep.stages.context import Context
from truestep.storage.interface import Store
from truestep.train.step import StepResult

LOOK_EVERY_S = 1.0
LAST_WORDS_S = 5.0
LIFELINE = "TRUESTEP_LIFELINE"
"""As truestep.elastic.lifeline names it: the end of a pipe whose other end closes when this process is gone."""


@dataclass
class Drills:
    """`every_s`: since the last one (`last_s`, Unix time), if there is a checkpoint that was not drilled yet; 0: never.
    `command` drills, and writes what it found as JSON to the file whose name is put behind it."""

    store: Store
    every_s: float
    last_s: float
    command: Sequence[str]
    alarm: Callable[[str], None]
    clock: Callable[[], float] = time.time
    drilled: str = ""
    process: subprocess.Popen | None = None
    _folder: tempfile.TemporaryDirectory = field(default_factory=lambda: tempfile.TemporaryDirectory("-drill"))
    _looked_s: float = 0.0
    _held: int = -1

    def after(self, result: StepResult | None = None) -> Sequence[Alarm]:
        """Looks after a step, about once a second: at the end of the present drill, or for the time of the next."""
        now = self.clock()
        if now - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now
            if self.process is not None:
                self._look_at(self.process)
            elif self.every_s and now - self.last_s >= self.every_s:
                self._begin(now)
        return ()

    def close(self) -> None:
        """The run ends, and with it the drill under way."""
        if self.process is not None:
            self._signal(signal.SIGTERM)
            try:
                self.process.wait(LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self.process.wait()
            self._ended()
        self._folder.cleanup()

    def _begin(self, now: float) -> None:
        self.last_s = now
        newest = self._newest()
        if newest in ("", self.drilled):
            return
        lifeline, held = os.pipe()
        try:
            self._file.unlink(missing_ok=True)
            with self._said.open("w") as said:
                self.process = subprocess.Popen(
                    [*self.command, str(self._file)],
                    env=outside(os.environ) | {"OMP_NUM_THREADS": "1", LIFELINE: str(lifeline)},
                    start_new_session=True,
                    pass_fds=[lifeline],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                )
        except OSError as error:  # no memory, processes or disk: no reason for the run to end
            os.close(held)
            self.alarm(f"no drill: {error}")
        else:
            self.drilled, self._held = newest, held
        finally:
            os.close(lifeline)

    def _newest(self) -> str:
        """Key of the newest checkpoint that counts; empty if there is none, or the store does not say."""
        try:
            good = trusted(self.store)
        except (CheckpointError, StorageError) as error:
            self.alarm(f"no drill: {error}")
            return ""
        return max(good).key if good else ""

    def _look_at(self, process: subprocess.Popen) -> None:
        code = process.poll()
        if code is None:
            return
        self._ended()
        if code == 1 and self._file.exists():
            self.alarm(f"a drill: {json.loads(self._file.read_text())['sentence']}")
        elif code:
            last = self._said.read_text().strip().splitlines()[-1:] or ["it said nothing"]
            self.alarm(f"a drill could not be carried out (exit code {code}): {last[0]}")

    def _ended(self) -> None:
        os.close(self._held)
        self.process = None

    def _signal(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @property
    def _file(self) -> Path:
        return Path(self._folder.name) / "found.json"

    @property
    def _said(self) -> Path:
        return Path(self._folder.name) / "said.txt"


def drills(context: Context, stage: str, store: Store) -> list[Drills]:
    """Of a stage, as the recipe wants them: one on rank 0, which ends with the attempt; none on others."""
    every_s = context.recipe.checkpoint.drill_every
    if context.log is None or not every_s:
        return []
    command = [sys.executable, "-m", "truestep", "drill", str(context.run_dir), "--stage", stage, "--background"]
    made = Drills(store, every_s, _since(read(context.run_dir)), [*command, "--json"], context.progress.alarm)
    context.closing.callback(made.close)
    return [made]


def _since(records: Iterable[Record]) -> float:
    """When the last drill was, else when the run began."""
    began, drilled = float("inf"), 0.0
    for record in records:
        if isinstance(record.data, AttemptStart):
            began = min(began, record.time_s)
        elif isinstance(record.data, Drill):
            drilled = max(drilled, record.data.at_s or record.time_s)
    return drilled or min(began, time.time())
