"""What happened to a run, and what was done about it: faults, decisions, members and drills, each counted once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from truestep.ledger.figure import NOT_RECORDED
from truestep.ledger.timeline import event_time
from truestep.ledger.words import duration
from truestep.runlog.records import AttemptStart, Decision, Drill, Fault, Member, Record, Sections, Skip, Step

Event = Fault | Decision | Member | Drill | Skip
E = TypeVar("E", bound=Event, covariant=True)


@dataclass(frozen=True)
class Incident(Generic[E]):
    """`time_s`: when it happened (Unix), which may be before the log heard of it."""

    time_s: float
    attempt: int
    event: E


@dataclass
class Incidents:
    """`quarantined`: hosts that the run does without now. `drill_every_s`: None where the log does not say. `skipped`:
    updates that were not applied, in all attempts."""

    events: list[Incident[Event]] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    drill_every_s: float | None = None
    drilled: Incident[Drill] | None = None  # the newest restore that went well, of a checkpoint not found damaged since
    skipped: int = 0
    sections: dict[str, Sections] = field(default_factory=dict)  # newest of each stage

    @property
    def drills(self) -> str:
        """How often restores are tried out, in words."""
        if self.drill_every_s is None:
            return NOT_RECORDED
        return f"every {duration(self.drill_every_s)}" if self.drill_every_s else "OFF"

    @property
    def faults(self) -> list[Incident[Fault]]:
        return [Incident(one.time_s, one.attempt, one.event) for one in self.events if isinstance(one.event, Fault)]

    @property
    def decisions(self) -> list[Incident[Decision]]:
        return [Incident(one.time_s, one.attempt, one.event) for one in self.events if isinstance(one.event, Decision)]


def incidents(records: Iterable[Record]) -> Incidents:
    """In the order in which they happened. An event that was brought from outside twice has the same id."""
    found, ids, hosts = Incidents(), set[str](), dict[str, bool]()
    good: dict[tuple[str, str], Incident[Drill]] = {}
    for record in records:
        data = record.data
        if isinstance(data, Fault | Decision | Member | Drill | Skip):
            identity = None if isinstance(data, Skip) else data.id
            if identity in ids:
                continue
            ids |= {identity} if identity else set()
            found.events.append(Incident(event_time(record), record.attempt, data))
        elif isinstance(data, AttemptStart):
            found.drill_every_s = data.drill_every_s
        elif isinstance(data, Step):
            found.skipped += data.skipped
        elif isinstance(data, Sections):
            found.sections[data.stage] = data
    found.events.sort(key=lambda one: one.time_s)
    for one in found.events:
        event = one.event
        if isinstance(event, Member) and event.event in ("quarantined", "joined"):
            hosts[event.host] = event.event == "quarantined"
        elif isinstance(event, Decision) and event.action == "quarantine" and event.host:
            hosts[event.host] = True
        elif isinstance(event, Drill) and not event.ok:
            good.pop((event.stage, event.checkpoint), None)
        elif isinstance(event, Drill) and event.level != "scrub":
            good[event.stage, event.checkpoint] = Incident(one.time_s, one.attempt, event)
    found.drilled = next(reversed(good.values()), None)
    found.quarantined = [host for host, out in hosts.items() if out]
    return found


def where(event: Event) -> str:
    """The rank and host that an event is about, or that nobody can be named."""
    if isinstance(event, Fault | Decision):
        rank = "" if event.rank is None else f"rank {event.rank}"
        host = "" if event.host is None else f"host {event.host}"
        place = ", ".join(part for part in (rank, host) if part)
        if isinstance(event, Fault) and not event.named:
            return f"unattributed; suspect {place}" if place else "unattributed"
        return place
    if isinstance(event, Member):
        return f"host {event.host}"
    return f"{event.stage}, step {event.step:,}"


def words(event: Event) -> str:
    """What happened, in one line."""
    if isinstance(event, Fault):
        since = "" if event.since is None else f"; results may be wrong since step {event.since:,}"
        return event.text + since
    if isinstance(event, Decision):
        back = "" if event.to_step is None else f" to step {event.to_step:,}"
        out = "" if not event.left_out else f", rows {event.left_out[0]:,} to {event.left_out[1] - 1:,} left out"
        world = "" if event.world is None else f", {_processes(event.world)} from here on"
        after = "" if event.seconds is None else f", after {duration(event.seconds)}"
        return f"{event.action}{back}{out}{world}{after}: {event.reason}"
    if isinstance(event, Member):
        processes = "" if event.processes is None else f" with {_processes(event.processes)}"
        return event.event + processes
    if isinstance(event, Drill):
        how = f"{event.level} on {_processes(event.world)}" if event.world else event.level
        steps = f", {event.steps} steps repeated" if event.steps else ""
        return f"{how}{steps}, in {duration(event.seconds)}: {'good' if event.ok else event.text}"
    return f"update left out: {event.reason}"


def _processes(count: int) -> str:
    return f"{count} process" + ("" if count == 1 else "es")
