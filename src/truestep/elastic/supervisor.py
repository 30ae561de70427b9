"""Outside the workers: starts an attempt, watches it, and decides what follows a failure. Torch-free.

    hosts that are here → group → start → watch → settled? → the verdict: done, again, or given up
                            ↑                                                |
                            └────────────────── the next group ──────────────┘

An attempt is settled when every rank has ended, waits for a new group, or is gone with its host. What follows is
decided by Members, Budget and judge, which are pure; this loop carries messages and keeps time.
"""

import signal
import time
from dataclasses import dataclass, field, replace

from truestep.elastic import judge
from truestep.elastic.attempt import CRASHED, Attempt, Fault
from truestep.elastic.events import Events
from truestep.elastic.members import Group, Members
from truestep.elastic.roster import Roster
from truestep.elastic.stacks import by_flight
from truestep.elastic.stopping import Warnings
from truestep.elastic.watcher import HangWatch
from truestep.runlog.counters import SectionOf

POLL_S = 0.02
LOOK_S = 0.25
"""How often progress, hosts that could be used, and notices are looked at."""
GRACE_S = 20.0
"""How long the others may go on after one has failed, to say what they have to say, before they are killed."""
SHORT_GRACE_S = 3.0
"""The same where a host was lost, or a rank crashed and no survivor is to stay: time for a last word. After a SIGKILL
there is none, since nobody has brought that on by what he did."""
JOIN_S = 600.0
"""How long to wait for hosts when there are too few."""
STATE = "elastic/state.json"
DUMPS = "elastic/dumps"


@dataclass(frozen=True)
class Outcome:
    """How a run ended for the command line: an exit code, and a sentence where the supervisor has something to say."""

    code: int
    sentence: str = ""


@dataclass(frozen=True)
class Stop:
    """Why an attempt was asked to stop politely; `whole`: the run is leaving, else it goes on with other hosts."""

    why: str
    whole: bool


@dataclass
class Supervisor:
    """`variables` are added to every worker's environment; `regroup`: survivors of a failure may stay for a new one."""

    events: Events
    members: Members
    roster: Roster
    variables: dict[str, str]
    warnings: Warnings = field(default_factory=Warnings)
    hangs: HangWatch | None = None
    regroup: bool = False
    attempt: Attempt | None = None
    group: Group | None = None
    outcome: Outcome | None = None
    _serial: int = 0  # of the newest start
    _pending: tuple[Group, bool] | None = None  # a group that waits for a port, and whether survivors take part
    _stop: Stop | None = None
    _deadline: float | None = None  # for the ranks that still run while others are out
    _short_since: float | None = None
    _looked: float = 0.0

    def run(self) -> Outcome:
        """Until the run is done, stopped or given up."""
        with self.warnings.hearing():
            try:
                self.roster.open()
                self._next("the run begins", None)
                while self.outcome is None:
                    self.turn()
                    time.sleep(POLL_S)
            finally:
                self.roster.close()
            if self.outcome.sentence:
                self.events.close(self.outcome.sentence)
            self.events.flush()
            return self.outcome

    def turn(self) -> None:
        """Once around: what came in, what is to be looked at, what is to be done about it. Does not wait."""
        self._hear()
        self._heed()
        self._look()
        self._act()

    def _hear(self) -> None:
        told, losses = self.roster.hear()
        if self.attempt is None:
            return
        for event in told:
            if event["serial"] != self._serial:
                continue
            if event["is"] == "ended":
                self.attempt.end(event["rank"], event["code"], time.monotonic(), event["step"])
            elif event["is"] == "waiting":
                self.attempt.wait(event["rank"], event["why"], time.monotonic())
        for loss in losses:
            for host in loss.hosts:
                self.attempt.lose(host, loss.why, time.monotonic())

    def _heed(self) -> None:
        """Somebody wants this run to end."""
        why = self.warnings.new()
        if why is None:
            return
        if self.attempt is None:
            self.outcome = Outcome(128 + signal.SIGINT, f"the run was stopped while no attempt ran ({why})")
        elif self.warnings.twice:
            self._stop = Stop(why, whole=True)
            self.roster.signal(signal.SIGKILL)
        else:
            self._ask_stop(Stop(why, whole=True))

    # What is looked at now and then

    def _look(self) -> None:
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        self.events.flush()
        if self.attempt is not None and not self.attempt.disturbed:
            self._look_for_hang(self.attempt)
        if self.attempt is None or self.group is None or self.attempt.disturbed or self._stop is not None:
            return
        leaving = sorted(self.members.leaving & {seat.host for seat in self.group.seats})
        if leaving:
            self._ask_stop(Stop(f"host {', '.join(leaving)} is leaving", whole=False))
        elif self._trains(self.attempt):
            larger = self.members.choose(time.time())
            if larger is not None and larger.world > self.group.world:
                self._ask_stop(Stop(f"there are hosts for {larger.world} processes", whole=False))

    def _look_for_hang(self, attempt: Attempt) -> None:
        """Where nothing moves any more: what all ranks are doing is written down, and the one that the others wait for
        is ended, or all where that is not known."""
        hang = self.hangs.look(self.roster.rows(), attempt.world) if self.hangs is not None else None
        if hang is None:
            return
        into = self.events.run_dir / DUMPS / f"hang-{self._serial}-{max(row['step'] for row in hang.rows.values())}"
        self.roster.dump(into)
        verdict = hang.verdict if hang.verdict.rank is not None else by_flight(into)
        hang = replace(hang, verdict=verdict)
        self.events.say(f"{hang.text}; what the ranks were doing lies in {into}")
        evidence = {"stacks": str(into), "counters": {str(rank): row for rank, row in hang.rows.items()}}
        attempt.hang(verdict.rank, hang.text, time.monotonic(), evidence)
        self.roster.signal(signal.SIGKILL, sorted(attempt.condemn()) if verdict.rank is None else [verdict.rank])

    def _ask_stop(self, stop: Stop) -> None:
        """Let the attempt end after its step, with a checkpoint. A stop of the whole run outweighs one to regroup."""
        if self._stop is None:
            if self.attempt is not None:
                self.attempt.asked = True
            self.events.say(f"{stop.why}; the attempt ends after this step, with a checkpoint")
            self.roster.signal(signal.SIGINT)
        if self._stop is None or stop.whole:
            self._stop = stop

    def _trains(self, attempt: Attempt) -> bool:
        """Whether every rank is in its loop: before that it has nothing to save, and cannot be asked to stop."""
        rows = self.roster.rows()
        return len(rows) >= attempt.world and all(row["section"] != SectionOf.START for row in rows)

    # What is done about it

    def _act(self) -> None:
        if self._pending is not None:
            self._start(*self._pending)
        elif self.attempt is None:
            self._wait_for_hosts()
        elif self.attempt.settled:
            self._judge(self.attempt)
        elif self.attempt.disturbed:
            self._hurry(self.attempt)

    def _hurry(self, attempt: Attempt) -> None:
        """Others may wait for a rank that is out: they get a while to say so."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._grace_s(attempt.fault)
        elif now > self._deadline:
            self.roster.signal(signal.SIGKILL, sorted(attempt.condemn()))
            self._deadline = now + GRACE_S

    def _grace_s(self, fault: Fault | None) -> float:
        if fault is None or (fault.kind != "lost" and (fault.host is None or self.regroup)):
            return GRACE_S
        return 0.0 if fault.code == -signal.SIGKILL else SHORT_GRACE_S

    def _judge(self, attempt: Attempt) -> None:
        """The attempt is over: the run too, or there is a next one."""
        verdict, fault, stop = attempt.verdict(), attempt.fault, self._stop
        if verdict == "refused":
            self.outcome = Outcome(2)
        elif verdict == "gate":
            self.outcome = Outcome(1)
        elif stop is not None and stop.whole:
            codes = {"broken": _code(fault), "interrupted": 128 + signal.SIGINT}
            self.outcome = Outcome(codes.get(verdict, 0))
        elif verdict == "interrupted" and stop is not None:
            self._next(stop.why, None)
        elif verdict == "ended":
            end = self.events.last_end()
            if stop is not None and end is not None and end.reason == "stopped":
                self._next(stop.why, None)
            else:
                self.outcome = Outcome(0)
        elif verdict == "again":
            reason, without = self.events.asked()
            ruling = judge.asked(self.members, reason, without, time.time())
            self._obey(ruling, reason, Fault("exit", reason, fault.at_s if fault else time.monotonic()))
        else:
            assert fault is not None
            self.events.fault(fault)
            end = self.events.last_end()
            said = end.error if end is not None and end.error else fault.text
            ruling = judge.failed(self.members, fault, attempt.step, said, time.time())
            self._obey(ruling, fault.text, fault)

    def _obey(self, ruling: judge.Ruling, why: str, fault: Fault) -> None:
        for host, reason in ruling.quarantined.items():
            self.events.member(host, "quarantined")
            self.events.decision("quarantine", reason, host=host)
            self.events.say(f"host {host} is quarantined: {reason}")
        for host, reason in ruling.evicted.items():
            self.events.decision("evict", f"host {host} {reason}", host=host)
            self.events.say(f"host {host} {reason} and is not used any more")
        if self.events.open:
            self.members.budget.save(self.events.run_dir / STATE)
        if ruling.stop is not None:
            self._give_up(ruling.stop, fault)
        else:
            self._next(why, fault)

    def _next(self, why: str, fault: Fault | None) -> None:
        """Choose the group that goes on, and start it; or wait for hosts, or give up."""
        before, group = self.group, self.members.choose(time.time())
        in_place = self.attempt is not None and bool(self.attempt.waiting)
        self.attempt, self._stop, self._deadline = None, None, None
        if group is None:
            return self._too_few(why, fault)
        if before is not None:
            seconds = round(time.monotonic() - fault.at_s, 3) if fault is not None else None
            self.events.decision(_action(before, group, in_place), why, world=group.world, seconds=seconds)
            how = " in place" if in_place else ""
            self.events.say(f"{why}; going on{how} with {group.world} processes on {_listed(group)}")
        self.members.started(group)
        self.roster.say_spares(group, time.time())
        self.group, self._pending = group, (group, in_place)
        self._start(group, in_place)

    def _too_few(self, why: str, fault: Fault | None) -> None:
        refused = self.members.refused(time.time())
        hosts = "; ".join(f"host {name} {text}" for name, text in refused.items())
        short = f"{why}; fewer than {self.members.fewest} processes can go on" + (f" ({hosts})" if hosts else "")
        if self.roster.hub is None:
            return self._give_up(short, fault)
        self._short_since = time.monotonic()
        self.events.say(f"{short}; waiting for hosts to join at port {self.roster.hub.port}")
        self.roster.signal(signal.SIGKILL)

    def _wait_for_hosts(self) -> None:
        if self.members.choose(time.time()) is not None:
            self._next("hosts have joined", None)
        elif self._short_since is not None and time.monotonic() - self._short_since > JOIN_S:
            needed = f"{self.members.fewest} processes are needed"
            self._give_up(f"no hosts joined within {JOIN_S:.0f} s, and {needed}", None)

    def _start(self, group: Group, in_place: bool) -> None:
        """Start a group, as soon as there is a port for its rank 0."""
        if any(name not in self.roster.machines for name in group.machines):
            self._pending = None
            return self._next("a host is gone before the group had begun", None)
        if (port := self.roster.port(group)) is None:
            return
        self._pending, self._serial, self.attempt = None, self._serial + 1, Attempt(group.hosts)
        launched = {"TRUESTEP_LAUNCHED": str(time.time())} if self._serial > 1 else {}
        self.roster.start(self._serial, group, port, in_place, self.variables | launched)

    def _give_up(self, why: str, fault: Fault | None) -> None:
        self.events.decision("stop", why)
        self.outcome = Outcome(_code(fault), f"the run is given up: {why}")


def _code(fault: Fault | None) -> int:
    return fault.code if fault is not None and fault.code is not None else CRASHED


def _action(before: Group, group: Group, in_place: bool) -> str:
    if group.world != before.world:
        return "shrink" if group.world < before.world else "grow"
    return "regroup" if in_place else "restart"


def _listed(group: Group) -> str:
    names = list(dict.fromkeys(group.hosts))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
