"""The report's tables of what happened to a run: faults and decisions, and ranks that lag."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from truestep.ledger.incidents import Event, Incident, Incidents, where, words
from truestep.ledger.words import duration
from truestep.runlog.records import Decision, Drill, Fault, Member, Sections

ROWS = 300
_NAMES = {Fault: "fault", Decision: "decision", Member: "member", Drill: "drill"}


@dataclass(frozen=True)
class SectionTable:
    """Seconds of each section of a step: fastest, median and slowest rank. `slow`: the ranks that lag, in words."""

    title: str
    rows: list[tuple[str, str, str, str]]
    slow: str


def event_rows(events: Iterable[Incident[Event]], begin_s: float) -> list[dict[str, Any]]:
    """The newest, oldest of them first: when after the run's beginning, what, where, words."""
    shown = list(events)[-ROWS:]
    return [
        {
            "when": f"{duration(max(0.0, one.time_s - begin_s))}",
            "attempt": one.attempt,
            "kind": _NAMES.get(type(one.event), "skip"),
            "what": _what(one.event),
            "where": where(one.event),
            "step": _step(one.event),
            "words": words(one.event),
        }
        for one in shown
    ]


def section_tables(found: Incidents) -> list[SectionTable]:
    """One a stage, of the newest record."""
    return [_table(sections) for sections in found.sections.values()]


def _table(sections: Sections) -> SectionTable:
    rows = []
    for name, seconds in sections.seconds.items():
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        rows.append((name, _ms(min(seconds)), _ms(median(seconds)), f"{_ms(seconds[slowest])} (rank {slowest})"))
    lag = sorted(sections.slow.items(), key=lambda item: -item[1])
    slow = ", ".join(f"rank {rank} takes {times:.2f} times the median" for rank, times in lag)
    title = f"{sections.stage}: mean of {sections.steps} steps up to step {sections.step:,}"
    return SectionTable(title, rows, slow or "no rank lags")


def _what(event: Event) -> str:
    """The kind within its kind."""
    if isinstance(event, Fault):
        return event.kind
    return event.action if isinstance(event, Decision) else ""


def _step(event: Event) -> str:
    step = None if isinstance(event, Member) else event.step
    return "" if step is None else f"{step:,}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
