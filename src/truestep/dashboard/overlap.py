"""How well communication hides behind compute, from the profiled steps of a run: a bar and a small table."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from truestep.runlog.records import Profile


@dataclass(frozen=True)
class OverlapView:
    """`parts` of the bar, which add up to a step; `rows` of the table: name, communication, exposed, its share of a
    step."""

    title: str
    parts: list[dict[str, Any]]
    rows: list[tuple[str, str, str, str]]


def overlap_views(profiles: Iterable[Profile]) -> list[OverlapView]:
    """One view a stage: of the last profile there is."""
    return [_view(profile) for profile in {profile.stage: profile for profile in profiles}.values()]


def _view(profile: Profile) -> OverlapView:
    hidden = profile.communication_s - profile.exposed_s
    parts_s = {
        "compute": (profile.compute_s - hidden, "#2563eb"),
        "compute that hides communication": (hidden, "#06b6d4"),
        "exposed communication": (profile.exposed_s, "#dc2626"),
        "neither": (profile.step_s - profile.compute_s - profile.exposed_s, "#cbd5e1"),
    }
    whole = sum(max(seconds, 0.0) for seconds, _ in parts_s.values())
    parts = [
        {"name": name, "time": _ms(seconds), "percent": 100 * seconds / whole, "colour": colour}
        for name, (seconds, colour) in parts_s.items()
        if seconds > 0
    ]
    rows = [_row("all", profile.communication_s, profile.exposed_s, profile.step_s)]
    if profile.worst_communication_s is not None and profile.worst_exposed_s is not None:
        worst = profile.worst_communication_s, profile.worst_exposed_s
        rows.append(_row("most on any rank", *worst, profile.step_s))
    for name, found in profile.groups.items():
        rows.append(_row(name, found["communication_s"], found["exposed_s"], profile.step_s))
    plural = "s" if profile.steps > 1 else ""
    title = f"{profile.stage}: mean of {profile.steps} step{plural} up to step {profile.step}, on rank 0"
    return OverlapView(title, parts, rows)


def _row(name: str, communication_s: float, exposed_s: float, step_s: float) -> tuple[str, str, str, str]:
    share = f"{exposed_s / step_s:.1%}" if step_s else ""
    return name, _ms(communication_s), _ms(exposed_s), share


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
