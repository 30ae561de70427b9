"""What became of injected faults, by the run's log alone: whether each was noticed, the right one named, and the run
went on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from truestep.ledger.incidents import Incident, incidents, where, words
from truestep.recipe.chaos import Expect, Fault
from truestep.runlog import records as log
from truestep.runlog.records import Record

NOTICES: dict[str, frozenset[str]] = {
    "kill": frozenset({"exit", "lost"}),
    "stop": frozenset({"hang", "straggler", "exit", "lost"}),
    "slow": frozenset({"straggler", "hang"}),
    "flip": frozenset(
        {"state", "replica", "replay", "collective", "statistics", "invariant", "host", "spike", "not finite"}
    ),
    "corrupt": frozenset({"checkpoint"}),
    "fill": frozenset({"save", "checkpoint"}),
    "partition": frozenset({"lost", "link", "hang"}),
}
"""Kinds of fault records that may be about each kind of injected fault."""
EARLY_S = 0.05  # clocks of processes that read a time at almost the same moment


@dataclass(frozen=True)
class Injection:
    """A fault as it struck. `at_s`: Unix time, None if it never did, and then `why_not` says why. `host`: of the rank
    that was hit, where that is known."""

    fault: Fault
    at_s: float | None = None
    step: int = 0
    host: str | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Noticed:
    """What the log says of it: when, in which words, about whom."""

    at_s: float
    says: str
    rank: int | None = None
    host: str | None = None
    named: bool = False


@dataclass(frozen=True)
class Outcome:
    """`located`: True the right one, False another one, None nobody was named. `recovered_s`: seconds from the fault to
    the first step that was done after it was noticed, or to the end of a run that had no more to do."""

    injection: Injection
    expected: Expect
    noticed: Noticed | None = None
    located: bool | None = None
    recovered_s: float | None = None
    decisions: list[str] = field(default_factory=list)

    @property
    def detected_s(self) -> float | None:
        """From the fault to its notice."""
        if self.noticed is None or self.injection.at_s is None:
            return None
        return max(0.0, self.noticed.at_s - self.injection.at_s)

    @property
    def verdict(self) -> Literal["as expected", "not injected", "not noticed", "wrong one named", "not recovered"]:
        if self.injection.at_s is None:
            return "not injected"
        if self.located is False:
            return "wrong one named"
        if self.expected != "tolerated" and self.noticed is None:
            return "not noticed"
        if self.expected == "located" and not self.located:
            return "not noticed"
        return "as expected" if self.recovered_s is not None else "not recovered"


def _goes_on(event: object, step: int) -> bool:
    if isinstance(event, log.AttemptEnd):
        return event.reason in ("finished", "gate")
    return isinstance(event, log.Step) and event.step >= step and not event.skipped


def outcomes(injections: Sequence[Injection], records: Sequence[Record], hang_s: float) -> list[Outcome]:
    """One for each injection, in the order given. Each notice counts for one injection."""
    found = incidents(records)
    hosts = [(r.time_s, r.data.hosts) for r in records if isinstance(r.data, log.AttemptStart)]
    hit = [_host_of(injection, hosts) for injection in injections]
    noticed = _assigned(injections, hit, list(_notices(found.faults, records)))
    results = []
    for number, injection in enumerate(injections):
        seen = noticed.get(number)
        if injection.at_s is None:
            results.append(Outcome(injection, injection.fault.expected(hang_s)))
            continue
        since_s = max(injection.at_s, seen.at_s if seen is not None else 0.0)
        later = (r for r in records if r.time_s > since_s)
        back_s = next((r.time_s for r in later if _goes_on(r.data, injection.step)), None)
        until_s = float("inf") if back_s is None else back_s
        about = [] if seen is None else [d for d in found.decisions if since_s - EARLY_S <= d.time_s <= until_s]
        results.append(
            Outcome(
                injection,
                injection.fault.expected(hang_s),
                seen,
                _located(injection, seen, hit[number]),
                None if back_s is None else back_s - injection.at_s,
                list(dict.fromkeys(words(decision.event) for decision in about)),  # supervisor and workers may say it
            )
        )
    return results


def _assigned(
    injections: Sequence[Injection], hit: Sequence[str | None], notices: list[tuple[str, Noticed]]
) -> dict[int, Noticed]:
    """The notice of each injection, by its number. A notice is about the newest injection before it that it may be
    about, of those on the rank or host that it names if there are any. That an attempt ended is a notice of a process
    that was lost where nothing else was said."""
    found: dict[int, Noticed] = {}
    for kind, notice in sorted(notices, key=lambda one: (one[0] == "ended", one[1].at_s)):
        fits = [
            number
            for number, one in enumerate(injections)
            if number not in found and one.at_s is not None and one.at_s <= notice.at_s + EARLY_S
            if kind in NOTICES[one.fault.kind] or (kind == "ended" and one.fault.kind in ("kill", "stop"))
        ]
        if fits:
            right = [number for number in fits if _located(injections[number], notice, hit[number])]
            found[max(right or fits, key=lambda number: injections[number].at_s or 0.0)] = notice
    return found


def _notices(faults: Sequence[Incident[log.Fault]], records: Sequence[Record]) -> Iterator[tuple[str, Noticed]]:
    """(kind of fault record, or "ended" for an attempt's end; what it says). A drill that fails leaves a fault."""
    for one in faults:
        event = one.event
        place = where(event)
        says = words(event) + (f" ({place})" if place else "")
        yield event.kind, Noticed(one.time_s, says, event.rank, event.host, event.named)
    for record in records:
        data = record.data
        if isinstance(data, log.Save) and not data.ok:
            yield "save", Noticed(record.time_s, f"saving step {data.step} failed: {data.error}")
        elif isinstance(data, log.Resume) and data.fell_back:
            yield "checkpoint", Noticed(record.time_s, f"resumed from step {data.step}: {'; '.join(data.fell_back)}")
        elif isinstance(data, log.AttemptEnd) and data.reason in ("failed", "again"):
            yield "ended", Noticed(record.time_s, f"the attempt ended: {data.error or data.reason}")


def _host_of(injection: Injection, hosts: Sequence[tuple[float, list[str]]]) -> str | None:
    """The host that was hit: as the injector knew it, else as the attempt of that time had its ranks."""
    if injection.fault.host is not None or injection.host is not None:
        return injection.fault.host or injection.host
    rank, names = injection.fault.rank, list[str]()
    for time_s, listed in hosts:
        if injection.at_s is not None and time_s <= injection.at_s:
            names = listed
    return names[rank] if rank is not None and rank < len(names) else None


def _located(injection: Injection, noticed: Noticed | None, host: str | None) -> bool | None:
    """Whether who is named is who was hit. A fault of no rank's own (a file, a disk) has nobody to name."""
    if noticed is None or not noticed.named:
        return None
    if injection.fault.kind in ("corrupt", "fill"):
        return None
    if noticed.host is not None and host is not None:
        return noticed.host == host
    return None if noticed.rank is None or injection.fault.rank is None else noticed.rank == injection.fault.rank
