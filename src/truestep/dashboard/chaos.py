"""What `truestep chaos` has found: a table for the terminal, and one HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from truestep.dashboard.bands import bands
from truestep.dashboard.page import page, put
from truestep.ledger.goodput import goodput
from truestep.ledger.history import collect
from truestep.ledger.incidents import incidents
from truestep.ledger.outcomes import Outcome
from truestep.ledger.words import duration, show
from truestep.runlog.records import Record


@dataclass(frozen=True)
class Row:
    """An outcome in words."""

    good: bool
    verdict: str
    fault: str
    step: str
    expected: str
    noticed: str
    located: str
    recovered: str
    says: str
    decisions: list[str]


def row(outcome: Outcome) -> Row:
    """The words for an outcome."""
    injection, noticed = outcome.injection, outcome.noticed
    located = {True: "yes", False: f"no: {noticed.says if noticed else ''}", None: "unattributed" if noticed else "–"}
    struck = injection.at_s is not None
    return Row(
        good=outcome.verdict == "as expected",
        verdict=outcome.verdict,
        fault=injection.fault.words,
        step=str(injection.step) if struck else "–",
        expected=outcome.expected,
        noticed="–" if outcome.detected_s is None else duration(outcome.detected_s),
        located=located[outcome.located],
        recovered="–" if outcome.recovered_s is None else duration(outcome.recovered_s),
        says=noticed.says if noticed else "" if struck else injection.why_not,
        decisions=outcome.decisions,
    )


def table(outcomes: Sequence[Outcome]) -> Table:
    """For the terminal: a verdict, and what there is to say of it."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(no_wrap=True)
    for one in map(row, outcomes):
        verdict = Text(one.verdict, style="bold green" if one.good else "bold red")
        times = [f"noticed after {one.noticed}"] if one.noticed != "–" else []
        times += [f"trained on after {one.recovered}"] if one.recovered != "–" else []
        head = Text(one.fault, style="bold") + Text(f" at step {one.step}" if one.step != "–" else "", style="not bold")
        about = Text(f"{', '.join([*times, f'located: {one.located}'])} (expected: {one.expected})", style="dim")
        says = [Text(text) for text in (one.says, *(f"→ {decision}" for decision in one.decisions)) if text]
        found.add_row(verdict, Text("\n").join([head, about, *says, Text()]))
    return found


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line."""
    good = sum(one.verdict == "as expected" for one in outcomes)
    return f"{good} of {len(outcomes)} faults as expected"


def write_page(out: Path, run: str, outcomes: Sequence[Outcome], records: Sequence[Record], ended: str) -> Path:
    """Write the page to `out`; nothing half-written. `ended`: how the run did, in words."""
    history = collect(records)
    whole, found = goodput(history), incidents(records)
    times = [one.recovered_s for one in outcomes if one.recovered_s is not None]
    tiles = [
        ("faults", str(len(outcomes)), "injected or planned"),
        ("noticed", str(sum(one.noticed is not None for one in outcomes)), "of them"),
        ("located", str(sum(one.located is True for one in outcomes)), "the right rank or host named"),
        ("longest", duration(max(times)) if times else "–", "from a fault to training on"),
        ("goodput", show(whole.goodput), f"best schedule {show(whole.ideal)}"),
    ]
    text = page(
        "chaos.html.j2",
        run=run,
        good=all(one.verdict == "as expected" for one in outcomes),
        summary=summary(outcomes),
        ended=ended,
        tiles=tiles,
        rows=[row(one) for one in outcomes],
        time=bands(whole, found.events),
    )
    return put(out, text)
