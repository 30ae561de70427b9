"""Who takes part: hosts come, fail, go and wait, and the next attempt's group is chosen among them. Pure: events in,
decisions out, no clock, no processes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from truestep.elastic.budget import Budget


@dataclass(frozen=True)
class Host:
    """A failure domain: processes that fail together. `machine` is the agent that starts them; machines may hold
    several hosts in tests and demonstrations. `order`: which host came first."""

    name: str
    machine: str
    processes: int
    order: int


@dataclass(frozen=True)
class Seat:
    """Processes of the group on one host."""

    host: str
    machine: str
    processes: int


@dataclass(frozen=True)
class Group:
    """The processes of an attempt, in rank order: the seats of a machine lie side by side."""

    seats: tuple[Seat, ...]

    @property
    def world(self) -> int:
        return sum(seat.processes for seat in self.seats)

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [seat.host for seat in self.seats for _ in range(seat.processes)]

    @property
    def machines(self) -> list[str]:
        """Each machine once, in the order of its first rank."""
        return list(dict.fromkeys(seat.machine for seat in self.seats))

    def ranks_on(self, machine: str) -> list[int]:
        """The ranks of a machine."""
        machines = [seat.machine for seat in self.seats for _ in range(seat.processes)]
        return [rank for rank, name in enumerate(machines) if name == machine]


@dataclass
class Members:
    """The hosts that are here, and which of them may be used. `fits(world)`: whether the run can go on with that many
    processes (`worlds.Worlds`). Between `fewest` and `most` the largest world that fits is chosen, but `spares`
    processes are not used to grow above the `usual` number: they are there to keep it."""

    fewest: int
    most: int
    fits: Callable[[int], bool]
    budget: Budget
    usual: int = 0
    spares: int = 0
    hosts: dict[str, Host] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    _came: int = 0

    def joined(self, name: str, machine: str, processes: int) -> None:
        """A host is here (again)."""
        self._came += 1
        self.hosts[name] = Host(name, machine, processes, self._came)
        self.leaving.discard(name)

    def gone(self, names: Iterable[str]) -> None:
        """Hosts are not here any more."""
        for name in names:
            self.hosts.pop(name, None)
            self.leaving.discard(name)

    def will_leave(self, names: Iterable[str]) -> None:
        """Hosts are about to go: they are not chosen any more."""
        self.leaving.update(name for name in names if name in self.hosts)

    def quarantine(self, name: str, reason: str) -> None:
        """A host was shown to be faulty: it is never chosen again."""
        self.budget.quarantined[name] = reason

    def refused(self, now_s: float) -> dict[str, str]:
        """The hosts that are here and must not be used, and why."""
        found = {}
        for name in self.hosts:
            if name in self.budget.quarantined:
                found[name] = f"is quarantined ({self.budget.quarantined[name]})"
            elif self.budget.spent(name, now_s):
                found[name] = f"has failed {times(self.budget.score(name, now_s))}"
            elif name in self.leaving:
                found[name] = "is leaving"
        return found

    def choose(self, now_s: float) -> Group | None:
        """The group of the next attempt: as large as can be, on the hosts with the fewest failures, first come first.
        None if not even `fewest` processes can be had."""
        refused = self.refused(now_s)
        usable = [host for host in self.hosts.values() if host.name not in refused]
        usable.sort(key=lambda host: (round(self.budget.score(host.name, now_s), 1), host.order))
        world = self._world(sum(host.processes for host in usable))
        return _seated(usable, world) if world else None

    def started(self, group: Group) -> None:
        """A group is at work: its size is to be kept from now on."""
        self.usual = max(self.usual, group.world)

    def _world(self, available: int) -> int | None:
        largest = min(available, self.most, max(self.usual, available - self.spares))
        for world in range(largest, self.fewest - 1, -1):
            if self.fits(world):
                return world
        return None

    def idle(self, group: Group) -> list[str]:
        """Hosts that are here and have no seat, the first that came first."""
        seated = {seat.host for seat in group.seats}
        return [name for name in self.hosts if name not in seated]


def times(score: float) -> str:
    """A score of failures in words."""
    return "once" if round(score, 1) == 1 else f"{score:.2g} times (older failures count less)"


def _seated(hosts: list[Host], world: int) -> Group:
    """The first hosts that make up the world. Machines lie in the order in which their first host came, so that ranks
    move as little as can be."""
    chosen, left = [], world
    for host in hosts:
        if left:
            processes = min(host.processes, left)
            chosen.append((host, processes))
            left -= processes
    first = {}
    for host, _ in chosen:
        first[host.machine] = min(host.order, first.get(host.machine, host.order))
    chosen.sort(key=lambda pair: (first[pair[0].machine], pair[0].machine, pair[0].order))
    return Group(tuple(Seat(host.name, host.machine, processes) for host, processes in chosen))
