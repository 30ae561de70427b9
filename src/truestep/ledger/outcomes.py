"""What became of injected faults, by the run's log alone: whether each was noticed, the right one named, and the run
went on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from truestep.ledger.incidents import Incident, incidents, where, words
from truestep.ledger.timeline import event_time
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
    the first step that was done after it was noticed."""

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


def outcomes(injections: Sequence[Injection], records: Sequence[Record], hang_s: float) -> list[Outcome]:
    """One for each injection, in the order given. Each notice counts for one injection."""
    found = incidents(records)
    notices = sorted(_notices(found.faults, records), key=lambda one: one[1].at_s)
    hosts = [(r.time_s, r.data.hosts) for r in records if isinstance(r.data, log.AttemptStart)]
    results: dict[int, Outcome] = {}
    for number, injection in sorted(enumerate(injections), key=lambda one: one[1].at_s or 0.0):
        expected = injection.fault.expected(hang_s)
        if injection.at_s is None:
            results[number] = Outcome(injection, expected)
            continue
        fits = [
            one
            for one in notices
            if one[0] in NOTICES[injection.fault.kind] | {"ended"} and one[1].at_s >= injection.at_s - EARLY_S
        ]
        fits.sort(key=lambda one: one[0] == "ended")  # that an attempt ended counts where nothing else was said
        chosen = fits[0] if fits and (fits[0][0] != "ended" or injection.fault.kind in ("kill", "stop")) else None
        if chosen is not None:
            notices.remove(chosen)
        noticed = chosen[1] if chosen is not None else None
        since_s = max(injection.at_s, noticed.at_s if noticed is not None else 0.0)
        steps = (r for r in records if isinstance(r.data, log.Step) and r.time_s > since_s)
        back = next((r.time_s for r in steps if r.data.step >= injection.step and not r.data.skipped), None)
        until_s = float("inf") if back is None else back
        results[number] = Outcome(
            injection,
            expected,
            noticed,
            _located(injection, noticed, _host_of(injection, hosts)),
            None if back is None else back - injection.at_s,
            [words(d.event) for d in found.decisions if injection.at_s - EARLY_S <= d.time_s <= until_s],
        )
    return [results[number] for number in range(len(injections))]


def _notices(faults: Sequence[Incident[log.Fault]], records: Sequence[Record]) -> Iterator[tuple[str, Noticed]]:
    """(kind of fault record, or "ended" for an attempt's end; what it says)."""
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
        elif isinstance(data, log.Drill) and not data.ok:
            at_s = event_time(record)
            yield "checkpoint", Noticed(at_s, f"the drill of step {data.step} failed: {data.text}")
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
