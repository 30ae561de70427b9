"""Machines that only pretend: a script says what their workers do, and everything that they are told is kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from truestep.elastic.budget import Budget
from truestep.elastic.events import Events
from truestep.elastic.members import Members
from truestep.elastic.roster import Roster
from truestep.elastic.supervisor import Supervisor

Script = Callable[["FakeMachine", dict[str, Any]], list[dict[str, Any]]]
"""Called with every order; returns what the machine has to tell of it."""


@dataclass
class FakeMachine:
    name: str
    hosts: Mapping[str, int]
    script: Script
    orders: list[dict[str, Any]] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    trains: bool = False
    gone: str | None = None
    closed: bool = False
    address: str | None = "10.0.0.2"
    found_at: str | None = "10.0.0.1"

    def follow(self, order: dict[str, Any]) -> None:
        self.orders.append(order)
        self.told += self.script(self, order)

    def events(self) -> list[dict[str, Any]]:
        told, self.told = self.told, []
        return told

    def port(self) -> int | None:
        return 4711

    def rows(self) -> list[dict[str, int]]:
        starts = self.starts
        ranks = starts[-1]["ranks"] if starts else []
        return [{"rank": rank["rank"], "step": 0, "pid": 1, "section": int(self.trains)} for rank in ranks]

    def lost(self) -> str | None:
        return self.gone

    def drop(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [order for order in self.orders if order["do"] == "start"]

    @property
    def signals(self) -> list[tuple[int, Any]]:
        return [(order["number"], order["ranks"]) for order in self.orders if order["do"] == "signal"]


def ended(order: dict[str, Any], codes: Mapping[int, int] | int, step: int | None = None) -> list[dict[str, Any]]:
    """Ranks of a start end: one code for all, or by rank."""
    ranks = [rank["rank"] for rank in order["ranks"]]
    by_rank = dict.fromkeys(ranks, codes) if isinstance(codes, int) else codes
    return [
        {"is": "ended", "serial": order["serial"], "rank": rank, "code": code, "step": step}
        for rank, code in by_rank.items()
        if rank in ranks
    ]


def waiting(order: dict[str, Any], *ranks: int) -> list[dict[str, Any]]:
    why = "a connection broke"
    return [{"is": "waiting", "serial": order["serial"], "rank": rank, "why": why} for rank in ranks]


def supervisor(run_dir, *machines: FakeMachine, fewest=1, most=None, restarts=3, **more) -> Supervisor:
    """Over machines that pretend. `run_dir` is made to look begun."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "run.json").write_text("{}")
    total = sum(sum(machine.hosts.values()) for machine in machines)
    members = Members(fewest, most or total, lambda _: True, Budget(restarts, 3600.0), usual=most or total)
    events = Events(run_dir)
    roster = Roster(members, events, {machine.name: machine for machine in machines})
    return Supervisor(events, members, roster, {}, **more)
