"""Outside the workers: starts an attempt, watches it, and decides what follows a failure. Torch-free.

    hosts that are here → group → start → watch → settled? → the verdict: done, again, or given up
                            ↑                                                |
                            └────────────────── the next group ──────────────┘

An attempt is settled when every rank has ended, waits for a new group, or is gone with its host. Members
(truestep.elastic.members) and budgets (truestep.elastic.budget) decide; this loop carries messages and keeps time.
"""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from truestep.elastic.attempt import CRASHED, Attempt, Fault
from truestep.elastic.budget import Budget
from truestep.elastic.events import Events
from truestep.elastic.machines import Hub, Machine, There
from truestep.elastic.members import Group, Members

POLL_S = 0.02
LOOK_S = 0.25
"""How often progress, spare hosts and notice files are looked at."""
GRACE_S = 20.0
"""How long the others may go on after one has failed, to say what they have to say, before they are killed."""
LOST_GRACE_S = 3.0
"""The same where a host was lost: whoever hears it not by now waits for a silent connection."""
JOIN_S = 600.0
"""How long to wait for hosts when there are too few."""
STATE, ASK = "elastic/state.json", "elastic/ask.json"


@dataclass(frozen=True)
class Outcome:
    """How a run ended for the command line: an exit code, and a sentence where the supervisor has something to say."""

    code: int
    sentence: str = ""


@dataclass
class Stop:
    """An attempt was asked to stop politely: because the run is leaving (`whole`), or to start it with other hosts."""

    why: str
    whole: bool


@dataclass
class Supervisor:
    """`variables` are added to every worker's environment. `notice`: a file that says the machine will be taken away."""

    run_dir: Path
    members: Members
    machines: dict[str, Machine]
    variables: dict[str, str]
    regroup: bool = False
    hub: Hub | None = None
    notice: Path | None = None
    events: Events = field(init=False)
    attempt: Attempt | None = None
    group: Group | None = None
    outcome: Outcome | None = None
    _serial: int = 0
    _pending: tuple[Group, bool] | None = None  # a group that waits for a port, and whether survivors take part
    _stop: Stop | None = None
    _stopped: bool = False  # the stop is on its way
    _heard: list[int] = field(default_factory=list)  # signals
    _deadline: float | None = None
    _short_since: float | None = None
    _looked: float = 0.0
    _without: dict[str, str] = field(default_factory=dict)
    _spares: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.events = Events(self.run_dir)

    @property
    def budget(self) -> Budget:
        return self.members.budget

    def run(self) -> Outcome:
        """Until the run is done, stopped or given up."""
        with self._signals():
            try:
                for machine in self.machines.values():
                    self._welcome(machine)
                self._next("the run begins", None)
                while self.outcome is None:
                    self._hear()
                    self._look()
                    self._act()
                    time.sleep(POLL_S)
            finally:
                for machine in self.machines.values():
                    machine.close()
                if self.hub is not None:
                    self.hub.close()
            if self.outcome.sentence:
                self.events.close(self.outcome.sentence)
            self.events.flush()
            return self.outcome

    # What comes in

    def _hear(self) -> None:
        for machine in self.hub.joined() if self.hub is not None else []:
            self._admit(machine)
        for machine in list(self.machines.values()):
            for event in machine.events():
                self._take(machine, event)
            if (why := machine.lost()) is not None:
                self._lose(machine, why)

    def _admit(self, machine: There) -> None:
        """A machine wants to join. One that comes back is told by its id; names of hosts are there once."""
        for known in list(self.machines.values()):
            if isinstance(known, There) and known.id == machine.id:
                self._lose(known, "came back after its connection had broken")
        taken = [name for name in machine.hosts if name in self.members.hosts]
        if taken or machine.name in self.machines:
            why = f"a host named {', '.join(taken) or machine.name} is here already; set TRUESTEP_HOST to another name"
            machine.follow({"do": "refuse", "why": why})
            machine.close()
            return
        self.machines[machine.name] = machine
        self._welcome(machine)

    def _welcome(self, machine: Machine) -> None:
        for name, processes in machine.hosts.items():
            self.members.joined(name, machine.name, processes)
            self._member(name, "joined", processes)

    def _lose(self, machine: Machine, why: str) -> None:
        now = time.monotonic()
        del self.machines[machine.name]
        machine.close()
        for name in machine.hosts:
            self._member(name, "left" if name in self.members.leaving else "lost")
            if self.attempt is not None:
                self.attempt.lose(name, why, now)
        self.members.gone(machine.hosts)
        self._spares -= set(machine.hosts)
        self._say(f"host {', '.join(machine.hosts)} {why}")

    def _take(self, machine: Machine, event: dict[str, Any]) -> None:
        if event["is"] == "leaving":
            self._say(f"host {', '.join(machine.hosts)} is leaving ({event['why']})")
            self.members.will_leave(machine.hosts)
        elif self.attempt is not None and event["serial"] == self._serial:
            if event["is"] == "ended":
                self.attempt.end(event["rank"], event["code"], time.monotonic())
            elif event["is"] == "waiting":
                self.attempt.wait(event["rank"], event["why"], event["again"], time.monotonic())
                self._without |= dict.fromkeys(event["without"], event["why"])

    # What is looked at now and then

    def _look(self) -> None:
        self._obey_signals()
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        self.events.flush()
        if self.notice is not None and self.notice.exists():
            self._ask_stop(Stop(f"the notice {self.notice} says that this machine will be taken away", whole=True))
        if self.attempt is None or self.group is None or self._stop is not None:
            return
        leaving = sorted(self.members.leaving & {seat.host for seat in self.group.seats})
        if leaving:
            self._ask_stop(Stop(f"host {', '.join(leaving)} is leaving", whole=False))
        elif self._trains():
            larger = self.members.choose(time.time())
            if larger is not None and larger.world > self.group.world:
                self._ask_stop(Stop(f"there are hosts for {larger.world} processes", whole=False))

    def _obey_signals(self) -> None:
        if not self._heard:
            return
        heard, self._heard = self._heard, []
        names = ", ".join(signal.Signals(number).name for number in heard)
        interrupted = [number for number in heard if number == signal.SIGINT]
        if (self._stop is not None and self._stop.whole and interrupted) or len(interrupted) > 1:
            self._stop = Stop("interrupted twice", whole=True)
            self._signal(signal.SIGKILL)
        else:
            self._ask_stop(Stop(names, whole=True))

    def _ask_stop(self, stop: Stop) -> None:
        """Let the attempt end after its step, with a checkpoint. That the whole run stops outweighs a change of hosts."""
        if self._stop is not None and (self._stop.whole or not stop.whole):
            return
        asked = self._stop is not None
        self._stop = stop
        if self.attempt is None:
            if stop.whole:
                self.outcome = Outcome(128 + signal.SIGINT, f"stopped before the run had begun ({stop.why})")
        elif not asked:
            self._say(f"{stop.why}: a checkpoint after this step")
            self._signal(signal.SIGINT)

    def _rows(self) -> list[dict[str, int]]:
        return [row for machine in self.machines.values() for row in machine.rows()]

    def _trains(self) -> bool:
        """Whether every rank has begun a step: only then is there something to save."""
        rows = self._rows()
        assert self.attempt is not None
        return len(rows) >= self.attempt.world and all(row["step"] > 0 for row in rows)

    # What is done about it

    def _act(self) -> None:
        if self._pending is not None:
            self._start()
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
            silent = attempt.fault is not None and attempt.fault.kind == "lost"
            self._deadline = now + (LOST_GRACE_S if silent else GRACE_S)
        elif now > self._deadline:
            condemned = attempt.condemn()
            self._deadline = now + GRACE_S
            self._signal(signal.SIGKILL, sorted(condemned))

    def _judge(self, attempt: Attempt) -> None:
        verdict, fault = attempt.verdict(), attempt.fault
        if verdict == "refused":
            self.outcome = Outcome(2)
        elif verdict == "gate":
            self.outcome = Outcome(1)
        elif verdict == "ended":
            self._ended()
        elif self._stop is not None and self._stop.whole:
            code = fault.code if fault is not None and fault.code is not None else CRASHED
            self.outcome = Outcome(code if verdict == "broken" else 0)
        else:
            self._failed(verdict == "again", fault)

    def _ended(self) -> None:
        """All ranks ended in order: the run is done, or was asked to stop."""
        end, stop = self.events.last_end(), self._stop
        if stop is None or stop.whole or end is None or end.reason != "stopped":
            self.outcome = Outcome(0)
        else:
            self._next(stop.why, None)

    def _failed(self, again: bool, fault: Fault | None) -> None:
        now_s, seen_s = time.time(), time.monotonic()
        reason, without = self._asked() if again else ("", {})
        spent_before = set(self.members.refused(now_s))
        for host, why in without.items():
            self.members.quarantine(host, why)
            self._member(host, "quarantined")
            self._decide("quarantine", why, host=host)
        if again:
            fault = None if fault is None else Fault("exit", reason or fault.text, fault.at_s)
            self.budget.failed(None, now_s)
        elif fault is not None:
            self._fault(fault)
            self.budget.failed(fault.host, now_s)
            if fault.kind == "exit":
                self.budget.failed_at(max((row["step"] for row in self._rows()), default=0), self._sentence(fault))
        for host in set(self.members.refused(now_s)) - spent_before - set(without):
            self._decide("evict", f"host {host} {self.members.refused(now_s)[host]}", host=host)
        self.budget.save(self.run_dir / STATE)
        text = fault.text if fault is not None else reason
        if self.budget.stuck:
            first = self.budget.series
            self._give_up(
                f"it failed {first.times} times in a row at step {first.step}, so the code or the data is the cause "
                f"and no machine; the first time: {first.text}",
                fault,
            )
        elif self.budget.run_spent(len(self.members.hosts), now_s):
            self._give_up(
                f"it failed {self.budget.run.now(now_s, self.budget.forget_s):.2g} times (older failures count less), "
                f"and machine.elastic.restarts allows {self.budget.restarts} a host; the last time: {text}",
                fault,
            )
        else:
            self._next(text, fault, seen_s)

    def _asked(self) -> tuple[str, dict[str, str]]:
        """What the workers said when they ended the attempt on purpose: why, and the hosts to do without."""
        file = self.run_dir / ASK
        without, self._without = self._without, {}
        if not file.exists():
            return next(iter(without.values()), "the attempt is to be started again"), without
        ask = json.loads(file.read_bytes())
        file.unlink()
        return ask["reason"], without | dict.fromkeys(ask["without"], ask["reason"])

    def _sentence(self, fault: Fault) -> str:
        """The first words about a failure: those of the workers' own log, if they had any."""
        end = self.events.last_end()
        return end.error if end is not None and end.error else fault.text

    def _next(self, why: str, fault: Fault | None, seen_s: float = 0.0) -> None:
        """Choose the group that goes on, and start it; or wait for hosts, or give up."""
        before, now_s = self.group, time.time()
        regroup = self.regroup and self.attempt is not None and bool(self.attempt.waiting)
        group = self.members.choose(now_s)
        self.attempt, self._stop, self._deadline = None, None, None
        if group is None:
            return self._too_few(why, fault)
        if before is not None:
            action = "shrink" if group.world < before.world else "grow" if group.world > before.world else "restart"
            action = "regroup" if regroup and action == "restart" else action
            seconds = round(time.monotonic() - fault.at_s, 3) if fault is not None else None
            how = " in place" if regroup else ""
            self._decide(action, why, world=group.world, seconds=seconds)
            self._say(f"{why}; going on{how} with {group.world} processes on {_listed(group)}")
        self.group, self._pending = group, (group, regroup)
        self.members.started(group)
        self._say_spares(group)
        self._start()

    def _too_few(self, why: str, fault: Fault | None) -> None:
        refused = self.members.refused(time.time())
        hosts = "; ".join(f"host {name} {text}" for name, text in refused.items())
        short = f"fewer than {self.members.fewest} processes are left" + (f": {hosts}" if hosts else "")
        if self.hub is None:
            return self._give_up(f"{why}; {short}", fault)
        if self._short_since is None:
            self._short_since = time.monotonic()
            self._say(f"{why}; {short}; waiting for hosts to join at port {self.hub.port}")
        self._signal(signal.SIGKILL)

    def _wait_for_hosts(self) -> None:
        if self.members.choose(time.time()) is not None:
            self._short_since = None
            self._next("hosts have joined", None)
        elif self._short_since is not None and time.monotonic() - self._short_since > JOIN_S:
            self._give_up(
                f"no hosts joined within {JOIN_S:.0f} s, and {self.members.fewest} processes are needed", None
            )

    def _start(self) -> None:
        """Tell every machine its part, as soon as the first one has a port for rank 0."""
        assert self._pending is not None
        group, regroup = self._pending
        first = self.machines.get(group.machines[0])
        if any(name not in self.machines for name in group.machines):
            return self._next("a host is gone before the group had begun", None)
        assert first is not None
        if (port := first.port()) is None:
            return
        self._pending, self._serial = None, self._serial + 1
        self.attempt, hosts = Attempt(group.hosts), group.hosts
        several = len(group.machines) > 1
        for machine in self.machines.values():
            taking_part = machine.name in group.machines
            order = {
                "do": "start",
                "serial": self._serial,
                "ranks": [{"rank": rank, "host": hosts[rank]} for rank in group.ranks_on(machine.name)],
                "world": group.world,
                "node": group.machines.index(machine.name) if taking_part else 0,
                "nodes": len(group.machines),
                "address": self._address(first) if several else "127.0.0.1",
                "port": port,
                "regroup": regroup,
                "variables": self.variables | ({"TRUESTEP_LAUNCHED": str(time.time())} if self._serial > 1 else {}),
            }
            machine.follow(order)

    def _address(self, first: Machine) -> str:
        """Where other machines reach rank 0's: the supervisor's own by the address that they have found it at."""
        if isinstance(first, There):
            return first.address
        return next(machine.wire.here for machine in self.machines.values() if isinstance(machine, There))

    def _give_up(self, why: str, fault: Fault | None) -> None:
        code = fault.code if fault is not None and fault.code is not None else CRASHED
        self._decide("stop", why)
        self.outcome = Outcome(code, f"the run is given up: {why}")

    # How it is told

    def _signal(self, number: int, ranks: list[int] | None = None) -> None:
        for machine in self.machines.values():
            machine.follow({"do": "signal", "number": int(number), "ranks": ranks})

    def _fault(self, fault: Fault) -> None:
        at_s = round(time.time() - (time.monotonic() - fault.at_s), 3)
        named = fault.host is not None
        values = {"text": fault.text, "rank": fault.rank, "host": fault.host, "named": named, "at_s": at_s}
        self.events.post("fault", kind=fault.kind, **values)

    def _decide(self, action: str, reason: str, **values: Any) -> None:
        self.events.post("decision", action=action, reason=reason, at_s=round(time.time(), 3), **values)

    def _member(self, host: str, event: str, processes: int | None = None) -> None:
        self.events.post("member", host=host, event=event, processes=processes, at_s=round(time.time(), 3))

    def _say_spares(self, group: Group) -> None:
        spares = {name for name in self.members.idle(group) if name not in self.members.refused(time.time())}
        for name in sorted(spares - self._spares):
            self._member(name, "spare", self.members.hosts[name].processes)
        self._spares = spares

    def _say(self, text: str) -> None:
        print(f"supervisor: {text}", flush=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM, and SLURM's SIGUSR1 (--signal) are heard here and passed on by the loop."""

        def hear(number: int, frame: FrameType | None) -> None:
            self._heard.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = {number: signal.signal(number, hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listed(group: Group) -> str:
    names = list(dict.fromkeys(group.hosts))
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
