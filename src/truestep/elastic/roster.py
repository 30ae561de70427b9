"""The machines of a run: who joins, who is lost, and how an order reaches all of them. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truestep.elastic.events import Events
from truestep.elastic.machines import Hub, Machine, There
from truestep.elastic.members import Group, Members
from truestep.elastic.ports import LOOPBACK


@dataclass(frozen=True)
class Loss:
    """A machine is gone, with its hosts; `why` follows a name."""

    hosts: tuple[str, ...]
    why: str


@dataclass
class Roster:
    """Keeps Members in step with the machines that are here. `hub`: where others join."""

    members: Members
    events: Events
    machines: dict[str, Machine]
    hub: Hub | None = None
    _spares: set[str] = field(default_factory=set)

    def open(self) -> None:
        """The machines that are here from the beginning."""
        for machine in self.machines.values():
            self._welcome(machine)

    def hear(self) -> tuple[list[dict[str, Any]], list[Loss]]:
        """What became of workers, and which machines are gone, since the last call."""
        for machine in self.hub.joined() if self.hub is not None else []:
            self._admit(machine)
        told, losses = [], []
        for machine in list(self.machines.values()):
            for event in machine.events():
                if event["is"] == "leaving":
                    self.members.will_leave(machine.hosts)
                    self.events.say(f"host {_names(machine)} is leaving: {event['why']}")
                else:
                    told.append(event)
            if (why := machine.lost()) is not None:
                losses.append(self._lose(machine, why))
        return told, losses

    def rows(self) -> list[dict[str, int]]:
        """The counters of all workers."""
        return [row for machine in self.machines.values() for row in machine.rows()]

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        """Send a signal to these ranks, or to all."""
        for machine in self.machines.values():
            machine.follow({"do": "signal", "number": int(number), "ranks": ranks})

    def dump(self, into: Path) -> None:
        """Let every machine write down what its workers are doing, into that folder of its own."""
        for machine in self.machines.values():
            machine.follow({"do": "dump", "into": str(into)})

    def port(self, group: Group) -> int | None:
        """A port for rank 0 of a group; None where its machine has none to offer yet."""
        return self.machines[group.machines[0]].port()

    def start(self, serial: int, group: Group, port: int, in_place: bool, variables: Mapping[str, str]) -> None:
        """Tell every machine its part in a group, those without one too: they send home who waits there."""
        address = self._address(group, group.machines[0])
        for machine in self.machines.values():
            order = {
                "do": "start",
                "serial": serial,
                "ranks": [{"rank": rank, "host": group.hosts[rank]} for rank in group.ranks_on(machine.name)],
                "world": group.world,
                "node": group.machines.index(machine.name) if machine.name in group.machines else 0,
                "nodes": len(group.machines),
                "address": address,
                "port": port,
                "mine": self._address(group, machine.name),
                "alone": self.hub is None,
                "regroup": in_place,
                "variables": dict(variables),
            }
            machine.follow(order)
        for machine in list(self.machines.values()):
            if self.members.leaving.issuperset(machine.hosts):
                machine.close()
                self._lose(machine, "has left")

    def say_spares(self, group: Group, now_s: float) -> None:
        """Hosts that could be used and have no seat are spares from here on."""
        refused = self.members.refused(now_s)
        spares = {name for name in self.members.idle(group) if name not in refused}
        for name in sorted(spares - self._spares):
            self.events.member(name, "spare", self.members.hosts[name].processes)
        self._spares = spares

    def close(self) -> None:
        """End every worker, and let the machines go."""
        for machine in self.machines.values():
            machine.close()
        if self.hub is not None:
            self.hub.close()

    def _admit(self, machine: There) -> None:
        """A machine wants to join. A name of a host is there once."""
        taken = [name for name in machine.hosts if name in self.members.hosts]
        if taken or machine.name in self.machines:
            why = f"a host named {', '.join(taken) or machine.name} is here already; set TRUESTEP_HOST to another name"
            machine.refuse(why)
            return
        self.machines[machine.name] = machine
        self._welcome(machine)
        self.events.say(f"host {_names(machine)} joined")

    def _welcome(self, machine: Machine) -> None:
        for name, processes in machine.hosts.items():
            self.members.joined(name, machine.name, processes)
            self.events.member(name, "joined", processes)

    def _lose(self, machine: Machine, why: str) -> Loss:
        del self.machines[machine.name]
        machine.drop()
        for name in machine.hosts:
            self.events.member(name, "left" if name in self.members.leaving else "lost")
        self.members.gone(machine.hosts)
        self._spares -= set(machine.hosts)
        self.events.say(f"host {_names(machine)} {why}")
        return Loss(tuple(machine.hosts), why)

    def _address(self, group: Group, name: str) -> str:
        """Where the group reaches a machine: the supervisor's own by the address that the others found it at, if they
        are not on it themselves."""
        machine = self.machines[name]
        if len(group.machines) == 1 or (machine.address is None and name not in group.machines):
            return LOOPBACK
        if machine.address is not None:
            return machine.address
        found = [at for other in group.machines if (at := self.machines[other].found_at) is not None]
        return next((at for at in found if not at.startswith("127.")), found[0])


def _names(machine: Machine) -> str:
    return ", ".join(machine.hosts)
