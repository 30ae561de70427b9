"""What follows a failure: who bears it, who is given up, and whether the run may go on. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from truestep.elastic.attempt import Fault
from truestep.elastic.members import Members, times


@dataclass(frozen=True)
class Ruling:
    """`quarantined`, `evicted`: hosts that are not used from here on, and why. `stop`: why the run is given up."""

    quarantined: dict[str, str] = field(default_factory=dict)
    evicted: dict[str, str] = field(default_factory=dict)
    stop: str | None = None


def asked(members: Members, reason: str, without: Mapping[str, str], now_s: float) -> Ruling:
    """The workers ended the attempt on purpose, for `reason`, and want to do without some hosts. The run bears it, so
    that it cannot go on so for ever."""
    for host, why in without.items():
        members.quarantine(host, why)
    members.budget.failed(None, now_s)
    return Ruling(quarantined=dict(without), stop=_stop(members, reason, now_s))


def failed(members: Members, fault: Fault, step: int | None, said: str, now_s: float) -> Ruling:
    """A fault, at `step` where that is known; `said`: what the workers' own log says about it. The host bears it, if it
    can be named, and the run."""
    before = members.refused(now_s)
    members.budget.failed(fault.host, now_s)
    if fault.kind == "exit" and step is not None:
        members.budget.failed_at(step, said)
    evicted = {host: why for host, why in members.refused(now_s).items() if host not in before}
    return Ruling(evicted=evicted, stop=_stop(members, fault.text, now_s))


def _stop(members: Members, last: str, now_s: float) -> str | None:
    budget = members.budget
    if budget.stuck:
        first = budget.series
        return (
            f"it failed {first.times} times in a row at step {first.step}, so the code or the data is the cause and no "
            f"machine; the first time: {first.text}"
        )
    if budget.run_spent(len(members.hosts), now_s):
        score = times(budget.run.now(now_s, budget.forget_s))
        return f"it failed {score}, and machine.elastic.restarts allows {budget.restarts} a host; the last time: {last}"
    return None
