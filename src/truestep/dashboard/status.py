"""Where a run stands, from its log and a look at its process."""

import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

from truestep.errors import LogError
from truestep.ledger.goodput import Goodput, goodput
from truestep.ledger.history import collect
from truestep.ledger.incidents import Incidents, incidents
from truestep.runlog.log import LogReader, is_locked, segments
from truestep.runlog.records import (
    AttemptEnd,
    AttemptStart,
    Drill,
    Eval,
    Gate,
    Record,
    Resume,
    Save,
    Segment,
    StageStart,
    Step,
)

State = Literal["running", "finished", "stopped", "failed", "silent"]
RECENT_STEPS = 50
PATIENCE_S = 120.0  # a process that cannot be looked at is silent after this long, or ten steps


@dataclass
class Status:
    """A run at one moment. None where the log does not say.

    state: running, finished, stopped (in order; the same command goes on), failed (it said so, or its process is gone
    without a word), silent (no record for long from a process that cannot be looked at from here).
    reason: what the last attempt said at its end: finished, stopped, gate, again or failed.
    """

    run: str
    state: State = "silent"
    reason: str | None = None
    says: str = ""
    attempt: int = 0
    world: int | None = None
    stages: list[str] = field(default_factory=list)
    stage: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    held_out: Eval | None = None
    saved: Save | None = None
    saved_age_s: float | None = None
    failed_saves: int = 0  # in a row, up to now
    goodput: Goodput | None = None
    incidents: Incidents = field(default_factory=Incidents)
    drilled_age_s: float | None = None  # of the newest checkpoint that a drill found good
    gates: dict[str, Gate] = field(default_factory=dict)
    time_left_s: float | None = None  # of this stage, while it runs
    age_s: float = 0.0  # of the newest record
    now_s: float = 0.0  # Unix time at which this was seen
    remarks: list[str] = field(default_factory=list)


@dataclass
class _Reading:
    """What is remembered on the way through the log. `first` and `last` are (step, time) in this attempt's stage."""

    found: Status
    process: Segment | None = None
    end: AttemptEnd | None = None
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    first: tuple[int, float] | None = None
    last: tuple[int, float] | None = None

    def take(self, record: Record, now_s: float) -> None:
        """Take in one record."""
        found, data = self.found, record.data
        found.age_s = now_s - record.time_s
        if isinstance(data, Segment):
            self.process = data
            if record.attempt != found.attempt:
                found.attempt, self.end = record.attempt, None
                self._begin()
        elif isinstance(data, AttemptStart):
            found.run, found.world, found.stages = data.run or found.run, data.world, data.stages
        elif isinstance(data, AttemptEnd):
            self.end = data
        elif isinstance(data, StageStart):
            found.stage, found.step, found.steps = data.stage, data.start_step, data.steps
            found.loss = found.lr = found.held_out = None
            self._begin()
        elif isinstance(data, Resume):
            found.stage, found.step = data.stage, data.step
        elif isinstance(data, Step):
            found.stage, found.step, found.loss, found.lr = data.stage, data.step, data.loss, data.lr
            self.recent.append(data)
            self.last = (data.step, record.time_s)
            self.first = self.first or self.last
        elif isinstance(data, Eval):
            found.held_out = data
        elif isinstance(data, Save):
            found.failed_saves = 0 if data.ok else found.failed_saves + 1
            if data.ok:
                found.saved, found.saved_age_s = data, now_s - record.time_s
        elif isinstance(data, Gate):
            found.gates[data.stage] = data

    def _begin(self) -> None:
        self.recent.clear()
        self.first = self.last = None

    def speeds(self) -> None:
        """Speed of the last steps; time left at the pace of this attempt, evaluations and stalls included."""
        found = self.found
        if not self.recent or self.first is None or self.last is None:
            return
        found.step_s = median(step.step_s for step in self.recent)
        whole_s = sum(step.step_s for step in self.recent)
        found.tokens_per_s = sum(step.tokens for step in self.recent) / whole_s if whole_s else None
        done = self.last[0] - self.first[0]
        pace_s = (self.last[1] - self.first[1]) / done if done > 0 else found.step_s
        if found.state == "running" and found.steps is not None:
            found.time_left_s = pace_s * (found.steps - self.last[0])


def status(run_dir: Path | str, now_s: float | None = None) -> Status:
    """Read the run's log (verified on the way). LogError: no run directory, an empty or an altered log."""
    now_s = time.time() if now_s is None else now_s
    reader, reading = LogReader(run_dir), _Reading(Status(run=Path(run_dir).resolve().name, now_s=now_s))
    records = list(reader.records())
    for record in records:
        reading.take(record, now_s)
    found = reading.found
    found.goodput, found.incidents = goodput(collect(records)), incidents(records)
    if found.incidents.drilled is not None:
        found.drilled_age_s = _drilled_age(records, found.incidents.drilled.event, now_s)
    if reading.process is None:
        raise LogError(f"{Path(run_dir) / 'log'} has no records: the run has not begun; start it with `truestep run`")
    found.remarks = reader.remarks
    _judge(found, reading.end, reading.process, segments(run_dir)[-1], reading.recent)
    reading.speeds()
    if found.state != "running" and (torn := reader.torn()):
        found.remarks.append(torn)
    return found


def _drilled_age(records: Sequence[Record], drill: Drill, now_s: float) -> float | None:
    """Age of the checkpoint itself, not of the drill."""
    saved = [
        r.time_s
        for r in records
        if isinstance(r.data, Save) and (r.data.stage, r.data.step) == (drill.stage, drill.step)
    ]
    return now_s - saved[-1] if saved else None


def _judge(found: Status, end: AttemptEnd | None, process: Segment, newest: Path, recent: Sequence[Step]) -> None:
    """Running, or how it ended."""
    if end is not None:
        states: dict[str, State] = {"finished": "finished", "stopped": "stopped", "gate": "stopped"}
        words = {
            "finished": "all stages are done",
            "stopped": "stopped in order",
            "gate": "a gate did not pass",
            "again": "ended because of a fault, to be started again",
            "failed": "the attempt failed",
        }
        found.state, found.reason = states.get(end.reason, "failed"), end.reason
        found.says = end.error or words[end.reason]
        return
    alive = _alive(process, newest)
    patience_s = max([PATIENCE_S, *(10 * step.step_s for step in recent)])
    if alive is None:
        alive = True if found.age_s <= patience_s else None
    if alive is None:
        found.state, found.says = "silent", f"no record from host {process.host}, which cannot be looked at from here"
    elif not alive:
        found.state, found.says = "failed", f"process {process.pid} is gone without a word (killed or crashed)"
    else:
        found.state = "running"
        found.says = f"process {process.pid} on {process.host}" + (", quiet" if found.age_s > patience_s else "")


def _alive(process: Segment, newest: Path) -> bool | None:
    """Whether the writer lives: it holds the segment's lock and its pid exists. None for another host's."""
    if process.host != socket.gethostname():
        return None
    if is_locked(newest) is False:
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and is somebody else's
        return True
    return True
