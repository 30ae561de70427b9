"""The report's picture of where time went: one band an attempt, in the order of time, with marks where something was
found or decided."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from truestep.ledger.goodput import Goodput
from truestep.ledger.incidents import Event, Incident, where, words
from truestep.ledger.timeline import IDLE, KINDS, Line, Piece
from truestep.ledger.words import duration
from truestep.runlog.records import Decision, Fault, Member

COLOURS = {
    "productive": "#2563eb",
    "data wait": "#f59e0b",
    "rework": "#dc2626",
    "checkpoint stall": "#a855f7",
    "evaluation": "#059669",
    "start-up": "#64748b",
    "detection": "#be185d",
    "restart": "#94a3b8",
    "idle": "#e2e8f0",
    "other": "#cbd5e1",
}
MORE_COLOURS = ["#0891b2", "#84cc16", "#db2777", "#7c3aed", "#b45309", "#0f766e"]
WIDTH, BINS = 1000, 500
ROWS = 60
_MARKS = {Fault: "#dc2626", Decision: "#0f172a"}


@dataclass(frozen=True)
class Band:
    """`percent`: how long it is beside the longest one. `svg`: the picture, of width 100 %."""

    title: str
    says: str
    percent: float
    svg: str


@dataclass(frozen=True)
class Bands:
    """`legend`: kind, colour, and time with its share of all time but idle. `left_out`: attempts too many to show."""

    bands: list[Band]
    legend: list[tuple[str, str, str]]
    left_out: int


def bands(whole: Goodput, events: Sequence[Incident[Event]]) -> Bands:
    """The newest attempts; time in which nobody wanted the run is cut out."""
    extra = [kind for kind in whole.seconds if kind not in COLOURS]
    colours = COLOURS | {kind: MORE_COLOURS[i % len(MORE_COLOURS)] for i, kind in enumerate(extra)}
    shown = whole.lines[-ROWS:]
    longest_s = max((_wanted_s(line) for line in shown), default=0.0)
    found = [_band(line, whole.of(line), colours, longest_s, events) for line in shown if line.pieces]
    kinds = [*KINDS, *extra]
    wanted_s = whole.wall_s - whole.seconds[IDLE]
    legend = []
    for kind, seconds in ((kind, whole.seconds[kind]) for kind in kinds if whole.seconds[kind] > 0):
        share = "" if kind == IDLE else f", {100 * seconds / wanted_s:.1f} %"
        legend.append((kind, colours[kind], duration(seconds) + share))
    return Bands(found, legend, len(whole.lines) - len(shown))


def _wanted_s(line: Line) -> float:
    return sum(s for kind, s in line.seconds.items() if kind != IDLE)


def _band(
    line: Line, share: float | None, colours: dict[str, str], longest_s: float, events: Iterable[Incident[Event]]
) -> Band:
    pieces = [piece for piece in line.pieces if piece.kind != IDLE]
    wanted_s, idle_s = _wanted_s(line), line.seconds.get(IDLE, 0.0)
    says = duration(wanted_s) + ("" if share is None else f", goodput {100 * share:.1f} %")
    says += f"; {duration(idle_s)} idle before" if idle_s else ""
    marks = [
        (_place(pieces, one.time_s), one)
        for one in events
        if isinstance(one.event, Fault | Decision | Member) and pieces and _within(pieces, one.time_s)
    ]
    percent = 100 * wanted_s / longest_s if longest_s else 0.0
    return Band(f"attempt {line.attempt}", says, percent, _svg(pieces, wanted_s, colours, marks))


def _within(pieces: list[Piece], time_s: float) -> bool:
    return pieces[0].begin_s <= time_s <= pieces[-1].end_s


def _place(pieces: list[Piece], time_s: float) -> float:
    """Seconds from the band's beginning to a time, what was cut out not counted."""
    return sum(max(0.0, min(time_s, piece.end_s) - piece.begin_s) for piece in pieces)


def _svg(
    pieces: list[Piece], wanted_s: float, colours: dict[str, str], marks: list[tuple[float, Incident[Event]]]
) -> str:
    scale = WIDTH / wanted_s if wanted_s else 0.0
    parts = [
        f'<rect x="{x * scale:.2f}" y="4" width="{s * scale:.2f}" height="22" fill="{colours[kind]}">'
        f"<title>{escape(kind)}</title></rect>"
        for x, s, kind in _thinned(pieces, wanted_s)
    ]
    for at_s, one in marks:
        x, colour = at_s * scale, _MARKS.get(type(one.event), "#0891b2")
        place = where(one.event)
        text = escape(f"{words(one.event)}{f' ({place})' if place else ''}")
        parts.append(
            f'<path d="M{x:.2f} 0 L{x:.2f} 30" stroke="{colour}" stroke-width="2" vector-effect="non-scaling-stroke">'
            f"<title>{text}</title></path>"
        )
    label = 'role="img" aria-label="where the time of an attempt went"'
    return f'<svg viewBox="0 0 {WIDTH} 30" preserveAspectRatio="none" {label}>{"".join(parts)}</svg>'


def _thinned(pieces: list[Piece], wanted_s: float) -> list[tuple[float, float, str]]:
    """(beginning, seconds, kind) one after the other. What happens within one of BINS is put together there, longest
    first, so that a run of a million steps is a picture of a few hundred pieces."""
    bins: list[dict[str, float]] = [{} for _ in range(BINS)]
    width_s = wanted_s / BINS
    at_s = 0.0
    for piece in pieces:
        end_s = at_s + piece.end_s - piece.begin_s
        while at_s < end_s:
            number = min(BINS - 1, int(at_s / width_s))
            until_s = end_s if number == BINS - 1 else min(end_s, (number + 1) * width_s)
            if until_s <= at_s:  # rounding at the edge of a bin
                until_s = end_s
            bins[number][piece.kind] = bins[number].get(piece.kind, 0.0) + until_s - at_s
            at_s = until_s
    joined: list[tuple[float, float, str]] = []
    at_s = 0.0
    for one in bins:
        last = joined[-1][2] if joined else ""
        for kind, seconds in sorted(one.items(), key=lambda item: (item[0] != last, -item[1])):
            if joined and joined[-1][2] == kind:
                joined[-1] = joined[-1][0], joined[-1][1] + seconds, kind
            else:
                joined.append((at_s, seconds, kind))
            at_s += seconds
    return joined
