"""The life of a run out of its log: attempts, cut into spans of one stage each.

Time before a stage begins belongs to the stage that it prepared: from the attempt's start, or from the card of the
stage before; an attempt that died before any stage began belongs to the stage that the next one began. What comes after
the last card belongs to the last stage. So spans tile the wall time of every attempt.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from truestep.runlog.records import AttemptEnd, AttemptStart, Card, Eval, Phase, Record, Save, StageStart, Step


@dataclass
class Span:
    """What one attempt did for one stage. Times are Unix seconds."""

    attempt: "Attempt"
    stage: str | None
    begin_s: float
    end_s: float
    start: StageStart | None = None
    steps: list[Step] = field(default_factory=list)
    again: list[bool] = field(default_factory=list)  # per step: whether it was done before, by whatever attempt
    evals: list[Eval] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    startup_s: float | None = None  # until the first step began, less what phases and evaluations account for

    @property
    def wall_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def step_s(self) -> float:
        return sum(step.step_s for step in self.steps)

    def timed_s(self) -> float:
        """Seconds that phases, evaluations and stalls so far account for."""
        told = [p.seconds for p in self.phases] + [e.eval_s for e in self.evals] + [s.stall_s for s in self.saves]
        return sum(told)


@dataclass
class Attempt:
    """One life of the processes. `start` is None if it died before it said anything, `end` if it was killed."""

    number: int
    begin_s: float
    end_s: float
    start: AttemptStart | None = None
    end: AttemptEnd | None = None
    spans: list[Span] = field(default_factory=list)
    after_s: float = 0.0  # end of the attempt before


@dataclass
class History:
    """All attempts of a run, in order, and every record that is not bound to time."""

    attempts: list[Attempt] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return [span for attempt in self.attempts for span in attempt.spans]

    def of_stage(self, stage: str) -> list[Span]:
        """The spans of one stage over all attempts."""
        return [span for span in self.spans if span.stage == stage]

    def stages(self) -> list[str]:
        """Names of the stages that began, in order."""
        return list(dict.fromkeys(span.stage for span in self.spans if span.stage))


def collect(records: Iterable[Record]) -> History:
    """Build the history. Records must come in log order."""
    history, reached = History(), dict[str, int]()
    for record in records:
        history.records.append(record)
        if not history.attempts or history.attempts[-1].number != record.attempt:
            ended_s = history.attempts[-1].end_s if history.attempts else 0.0
            history.attempts.append(Attempt(record.attempt, record.time_s, record.time_s, after_s=ended_s))
        _take(history.attempts[-1], record, reached)
    _name_stageless(history)
    for span in history.spans:
        if span.startup_s is None:
            span.startup_s = max(0.0, span.wall_s - span.timed_s())
    return history


def _take(attempt: Attempt, record: Record, reached: dict[str, int]) -> None:
    data = record.data
    if isinstance(data, AttemptStart):
        attempt.start = data
        if data.launched_s is not None:
            attempt.begin_s = min(max(data.launched_s, attempt.after_s), attempt.begin_s)
    if isinstance(data, AttemptEnd):
        attempt.end = data
    if not attempt.spans:
        attempt.spans.append(Span(attempt, None, attempt.begin_s, record.time_s))
    span = attempt.spans[-1]
    span.begin_s = min(span.begin_s, attempt.begin_s) if len(attempt.spans) == 1 else span.begin_s
    attempt.end_s = span.end_s = record.time_s
    if isinstance(data, StageStart):
        if span.start is not None:
            span = Span(attempt, data.stage, record.time_s, record.time_s)
            attempt.spans.append(span)
        span.stage, span.start = data.stage, data
    elif isinstance(data, Step):
        if span.startup_s is None:
            span.startup_s = max(0.0, record.time_s - data.step_s - span.begin_s - span.timed_s())
        span.steps.append(data)
        span.again.append(data.step <= reached.get(data.stage, 0))
        reached[data.stage] = max(data.step, reached.get(data.stage, 0))
    elif isinstance(data, Eval):
        span.evals.append(data)
    elif isinstance(data, Save):
        span.saves.append(data)
    elif isinstance(data, Phase):
        span.phases.append(data)
    elif isinstance(data, Card):
        attempt.spans.append(Span(attempt, None, record.time_s, record.time_s))


def _name_stageless(history: History) -> None:
    following = None
    for span in reversed(history.spans):
        span.stage = following = span.stage or following
    for before, span in pairwise(history.spans):
        if span.stage is None and span.attempt is before.attempt:
            span.stage, span.startup_s = before.stage, 0.0  # a leave-taking, no start-up


def standing_steps(history: History, stage: str) -> list[Step]:
    """The steps the run stands on: where a later one starts again at step s, earlier ones of s and above fall away."""
    steps: list[Step] = []
    for span in history.of_stage(stage):
        for step in span.steps:
            while steps and steps[-1].step >= step.step:
                steps.pop()
            steps.append(step)
    return steps
