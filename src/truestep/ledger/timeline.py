"""The wall time of a run as a line of touching pieces, from the first command to the last record, each of one kind.

A record tells how long something took and when it ended. What no record tells lies between, and means, in this order:
  after a failure   from the last progress to the moment at which somebody noticed (a fault, a decision, the attempt's
                    end, else the next attempt's beginning) it is detection, from there to the next step restart
  after an end in order, until the next attempt is asked for, it is idle
  before an attempt's first step it is start-up, or restart if a failure made the attempt necessary
  else it is other
Named phases (data build, export, ...) are kinds of their own.
Times are whole microseconds inside, so that pieces add up to the wall time exactly.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from truestep.ledger.history import Attempt, History
from truestep.ledger.ledger import DATA_WAIT, EVALUATION, OTHER, PRODUCTIVE, RESTART, REWORK, STALL, STARTUP
from truestep.runlog.records import (
    IN_ORDER,
    AttemptEnd,
    Decision,
    Drill,
    Eval,
    Fault,
    Member,
    Phase,
    Record,
    Save,
    Step,
)

DETECTION, IDLE = "detection", "idle"
_RECENT = 4096  # gaps that are looked at for time that a later record tells of
KINDS = (PRODUCTIVE, DATA_WAIT, REWORK, STALL, EVALUATION, STARTUP, DETECTION, RESTART, IDLE, OTHER)


class Piece(NamedTuple):
    """A stretch of time of one kind. Unix seconds."""

    begin_s: float
    end_s: float
    kind: str


@dataclass(frozen=True)
class Line:
    """One attempt, and the time between the attempt before and this one."""

    attempt: int
    pieces: list[Piece]
    micros: dict[str, int]  # by kind

    @property
    def seconds(self) -> dict[str, float]:
        return {kind: us / 1e6 for kind, us in self.micros.items()}


@dataclass(frozen=True)
class Timeline:
    """`failures`: how often the run lost what came after its newest checkpoint, or its processes."""

    lines: list[Line]
    failures: int

    def micros(self) -> dict[str, int]:
        """Microseconds of each of KINDS, and of named phases, in the whole run."""
        total: dict[str, int] = dict.fromkeys(KINDS, 0)
        for line in self.lines:
            for kind, us in line.micros.items():
                total[kind] = total.get(kind, 0) + us
        return total


def timeline(history: History) -> Timeline:
    """The line of every attempt, in order."""
    walk = _Walk()
    by_attempt: dict[int, list[Record]] = defaultdict(list)
    for record in history.records:
        by_attempt[record.attempt].append(record)
    for attempt in history.attempts:
        walk.begin(attempt)
        for record in by_attempt[attempt.number]:
            walk.take(record)
        walk.end(attempt)
    walk.close()
    return Timeline([_line(attempt, spans) for attempt, spans in walk.lines], walk.failures)


def event_time(record: Record) -> float:
    """When what a record tells happened: events from outside the workers say so themselves."""
    at_s = record.data.at_s if isinstance(record.data, Fault | Decision | Member | Drill) else None
    return record.time_s if at_s is None else at_s


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


@dataclass
class _Span:
    """Microseconds [begin, end) of one kind. `claims`: what was found to have been in it later, each from its front."""

    begin: int
    end: int
    kind: str
    after: tuple[str, int] | None = None  # the step that ended where it begins
    claims: list[tuple[str, int]] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.end - self.begin - sum(us for _, us in self.claims)

    def parts(self) -> Iterator[tuple[int, int, str]]:
        at = self.begin
        for kind, us in self.claims:
            yield at, at + us, kind
            at += us
        yield at, self.end, self.kind


@dataclass
class _Walk:
    """Goes through the attempts. `open`: spans whose kind the next step, or the end, will tell."""

    lines: list[tuple[int, list[_Span]]] = field(default_factory=list)
    failures: int = 0
    at: int = 0
    open: list[_Span] = field(default_factory=list)
    noticed: list[int] = field(default_factory=list)  # since the last progress
    reached: dict[str, int] = field(default_factory=dict)
    last: tuple[str, int] | None = None  # step of this attempt
    broken: bool = False  # an attempt has failed since the last progress
    tail: bool = False  # such an attempt had trained, so that its time from the last progress on is the failure's
    gaps: list[_Span] = field(default_factory=list)  # of this attempt
    before: tuple[bool, bool] = (False, False)  # broken and tail when this attempt began
    silent: bool = False  # it ended without a word, or still runs

    @property
    def spans(self) -> list[_Span]:
        return self.lines[-1][1]

    def begin(self, attempt: Attempt) -> None:
        begin = _micros(attempt.begin_s)
        if not self.lines:
            self.at = begin
        self.lines.append((attempt.number, []))
        self._wait(begin, RESTART if self.broken else IDLE)
        self.noticed.append(begin)
        self.gaps, self.last = [], None
        self.before = self.broken, self.tail

    def take(self, record: Record) -> None:
        data, now = record.data, _micros(record.time_s)
        if isinstance(data, Fault | Decision) or (isinstance(data, Member) and data.event in ("lost", "quarantined")):
            self.noticed.append(_micros(event_time(record)))
        elif isinstance(data, AttemptEnd):
            self.noticed.append(now)
        if isinstance(data, Step):
            self._step(data, now)
        elif isinstance(data, Eval):
            self._told(EVALUATION, data.eval_s, now)
        elif isinstance(data, Phase):
            self._told(data.name, data.seconds, now)
        elif isinstance(data, Save):
            self._wait(now, OTHER)
            self._claim(STALL, _micros(data.stall_s), (data.stage, data.step))
        else:
            self._wait(now, OTHER)

    def end(self, attempt: Attempt) -> None:
        """Whether the attempt failed is known; a failure's time gets its kinds with the next step."""
        self.silent = attempt.end is None
        if attempt.end is None or attempt.end.reason not in IN_ORDER:
            self.broken, self.tail = True, self.tail or self.last is not None
        else:
            self._settle()

    def close(self) -> None:
        """The log ends here. A last attempt without a word may still be running: no failure, until another follows."""
        if self.silent:
            self.broken, self.tail = self.before if self.last is None else (False, False)
        self._settle()

    def _step(self, step: Step, now: int) -> None:
        begin = max(self.at, now - max(0, _micros(step.step_s)))
        self._wait(begin, OTHER)
        if self.last is not None and self.last[0] == step.stage and step.step <= self.last[1]:
            self.broken = self.tail = True  # rolled back in place
        self._settle()
        again = step.step <= self.reached.get(step.stage, 0)
        self.reached[step.stage] = max(step.step, self.reached.get(step.stage, 0))
        waited = min(max(0, _micros(step.data_s or 0.0)), max(0, now - begin))
        self._add(begin + waited, DATA_WAIT)
        self._add(now, REWORK if again else PRODUCTIVE)
        self.last = step.stage, step.step

    def _told(self, kind: str, seconds: float, now: int) -> None:
        """Something of this kind ended now. What does not fit behind the record before is taken from earlier gaps."""
        whole = max(0, _micros(seconds))
        fits = min(whole, max(0, now - self.at))
        self._wait(now - fits, OTHER)
        self._add(now, kind)
        self._claim(kind, whole - fits, None)

    def _add(self, until: int, kind: str) -> _Span | None:
        if until <= self.at:
            return None
        span = _Span(self.at, until, kind)
        self.spans.append(span)
        self.at = until
        return span

    def _wait(self, until: int, kind: str) -> None:
        """Time that no record tells of, up to `until`."""
        span = self._add(until, kind)
        if span is not None and kind != IDLE:
            span.after = self.last
            self.open.append(span)
            self.gaps.append(span)

    def _claim(self, kind: str, us: int, after: tuple[str, int] | None) -> None:
        """Take time out of this attempt's gaps: first out of the one after that step, then from the newest back."""
        recent = self.gaps[: -_RECENT - 1 : -1]
        first = [gap for gap in recent if after is not None and gap.after == after][-1:]
        for gap in [*first, *recent]:
            if (part := min(us, gap.free)) > 0:
                gap.claims.append((kind, part))
                us -= part

    def _settle(self) -> None:
        """Give the open spans their kind."""
        whole = STARTUP if self.last is None else OTHER
        seen = min((at for at in self.noticed if self.open and at >= self.open[0].begin), default=0)
        for span in self.open:
            span.kind = RESTART if self.broken else whole
            if self.broken and self.tail and span.begin < seen:
                span.claims.append((DETECTION, min(seen - span.begin, span.free)))
        self.failures += self.broken and self.tail
        self.open, self.noticed, self.broken, self.tail = [], [], False, False


def _line(attempt: int, spans: Iterable[_Span]) -> Line:
    pieces, micros = list[Piece](), dict[str, int]()
    for begin, end, kind in (part for span in spans for part in span.parts()):
        if end == begin:
            continue
        micros[kind] = micros.get(kind, 0) + end - begin
        if pieces and pieces[-1].kind == kind:
            pieces[-1] = pieces[-1]._replace(end_s=end / 1e6)
        else:
            pieces.append(Piece(begin / 1e6, end / 1e6, kind))
    return Line(attempt, pieces, micros)
