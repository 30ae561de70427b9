"""The agent of one machine: starts its workers as the supervisor orders, and tells what becomes of them. Torch-free.

The supervisor calls the agent of its own machine directly; on other machines `truestep node` stands between, and the
same orders and events go over a wire (truestep.elastic.wire). Both are mappings that JSON can carry:

    start    serial, ranks [{rank, host}], world, node, nodes, address and port (of rank 0), mine (this machine's
             address for the others), alone (whether no other machine can join), variables, regroup
    dump     into                       write down what every worker is doing
    signal   number, ranks (None: all)
    ended    serial, rank, code, step   a worker ended
    waiting  serial, rank, why          a worker left its broken group and waits for a new one
    beat     port (free for the next group), rows (of the counters)
"""

import os
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truestep.elastic import stacks
from truestep.elastic.attempt import crash
from truestep.elastic.interfaces import interface_of
from truestep.elastic.keeper import Keeper
from truestep.elastic.ports import LOOPBACK, free_port
from truestep.elastic.starts import STARTS, Ended, Nodes, Start, Work
from truestep.elastic.waiting import Door
from truestep.elastic.watcher import observed
from truestep.parallel.orders import VARIABLE as ORDERS
from truestep.runlog import counters
from truestep.storage.keeper import ADDRESS, TOKEN

SUPERVISED, INTERFACE = "TRUESTEP_SUPERVISED", "GLOO_SOCKET_IFNAME"


@dataclass
class _Worker:
    """A process of ours. `serial` is the start it belongs to; None: it was sent home, and is of no interest."""

    number: int
    serial: int | None
    rank: int
    host: str
    slot: int
    door: Door | None


@dataclass
class Agent:
    """`hosts`: processes of each host that this machine stands for (one host, but in tests and demonstrations).
    `start`: "fork" or "torchrun"; `regroup`: whether workers may wait for a new group (fork only)."""

    hosts: Mapping[str, int]
    start: str
    arguments: list[str]
    regroup: bool = False
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _failures: dict[int, int] = field(default_factory=dict)  # by slot
    _blamed: int = -1  # the newest start of which a worker crashed
    _numbered: int = 0
    _keepers: dict[str, Keeper] = field(default_factory=dict)  # by host; of checkpoints in memory

    def __post_init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="truestep-")
        self._counters = Path(os.environ.get(counters.VARIABLE) or Path(self._folder.name) / "counters")
        self._dumps = Path(self._folder.name) / "dumps"
        names = [host for host, processes in self.hosts.items() for _ in range(processes)]
        self._slots = {slot: host for slot, host in enumerate(names)}
        self._start: Start = STARTS[self.start](self.arguments)

    def follow(self, order: dict[str, Any]) -> None:
        """Carry out an order of the supervisor."""
        if order["do"] == "start":
            self._begin(order)
        elif order["do"] == "signal":
            for worker in self._workers.values():
                if order["ranks"] is None or (worker.serial is not None and worker.rank in order["ranks"]):
                    self._start.signal(worker.number, order["number"])
        elif order["do"] == "dump":
            stacks.dump(self.pids(), self._dumps, Path(order["into"]))

    def events(self) -> list[dict[str, Any]]:
        """What happened since the last call. Does not wait."""
        told = []
        for end in self._start.ends():
            worker = self._workers.pop(end.number)
            told += self._ended(worker, end)
        for worker in self._workers.values():
            said = worker.door.knocked() if worker.door is not None else None
            if said is not None and worker.serial is not None:
                told.append({"is": "waiting", "serial": worker.serial, "rank": worker.rank, "why": said["why"]})
        return told

    def beat(self) -> dict[str, Any]:
        """A sign of life: a free port, and how far the workers are."""
        pids = set(self._start.pids().values())
        rows = counters.read(self._counters) if self._counters.exists() else []
        alive = observed([row for row in rows if row["pid"] in pids])
        return {"is": "beat", "port": free_port(), "rows": alive}

    def pids(self) -> dict[int, int]:
        """Process identifiers of the workers by rank."""
        known = self._start.pids()
        return {worker.rank: known[number] for number, worker in self._workers.items() if number in known}

    def close(self) -> None:
        """End every worker at once."""
        self._start.close()
        for worker in self._workers.values():
            if worker.door is not None:
                worker.door.close()
        for keeper in self._keepers.values():
            keeper.close()
        self._folder.cleanup()

    def _ended(self, worker: _Worker, end: Ended) -> list[dict[str, Any]]:
        if worker.door is not None:
            worker.door.close()
        if worker.serial is None:
            return []
        if crash(end.code) and self._blamed != worker.serial:  # the others merely follow
            self._blamed = worker.serial
            self._failures[worker.slot] = self._failures.get(worker.slot, 0) + 1
        ended = {"is": "ended", "serial": worker.serial, "rank": worker.rank, "code": end.code}
        return [ended | {"step": self._step_of(worker)}]

    def _step_of(self, worker: _Worker) -> int | None:
        """The last step that a worker counted, if it got that far."""
        rows = [row for row in counters.read(self._counters) if row["pid"] and row["rank"] == worker.rank]
        newest = max(rows, key=lambda row: row["beat_ns"], default=None)  # others had this rank in earlier groups
        return None if newest is None else newest["step"]

    def _begin(self, order: dict[str, Any]) -> None:
        """Give the ranks to workers that wait, if that is ordered, and start what is missing."""
        survivors = [w for w in self._workers.values() if order["regroup"] and w.door is not None and w.door.open]
        wanted, works = list(order["ranks"]), []
        if not self._workers:
            counters.make(self._counters, len(self._slots))
        for seat in list(wanted):
            fitting = [worker for worker in survivors if worker.host == seat["host"]]
            worker = min(fitting, key=lambda worker: worker.rank != seat["rank"], default=None)
            if worker is not None:
                survivors.remove(worker)
                wanted.remove(seat)
                worker.serial, worker.rank = order["serial"], seat["rank"]
        for seat in wanted:
            worker = self._new(order["serial"], seat)
            works.append(Work(worker.number, worker.rank, worker.slot, self._variables(worker, order)))
        for worker in self._workers.values():
            if worker.serial == order["serial"] and worker.door is not None and worker.door.open:
                worker.door.answer(self._place(worker, order))
            elif worker.serial != order["serial"]:
                self._send_home(worker)
        if works:
            self._start.start(works, Nodes(order["node"], order["nodes"], order["address"], order["port"]))

    def _new(self, serial: int, seat: dict[str, Any]) -> _Worker:
        """A worker in the slot of its host that has failed least."""
        taken = {worker.slot for worker in self._workers.values()}
        slots = [slot for slot, host in self._slots.items() if host == seat["host"]]
        slot = min(slots, key=lambda slot: (slot in taken, self._failures.get(slot, 0), slot))
        self._numbered += 1
        door = Door(Path(self._folder.name) / str(self._numbered)) if self.regroup else None
        worker = _Worker(self._numbered, serial, seat["rank"], seat["host"], slot, door)
        self._workers[worker.number] = worker
        return worker

    def _send_home(self, worker: _Worker) -> None:
        worker.serial = None
        if worker.door is not None and worker.door.open:
            worker.door.answer({"exit": True})
        else:
            self._start.signal(worker.number, signal.SIGKILL)

    def _place(self, worker: _Worker, order: dict[str, Any]) -> dict[str, Any]:
        return {
            "rank": worker.rank,
            "world": order["world"],
            "local_rank": worker.slot,
            "local_world": len(order["ranks"]),
            "master_addr": order["address"],
            "master_port": order["port"],
            "interface": _interface(order),
            "keeper": self._keeper(worker.host, order).get(ADDRESS),
        }

    def _variables(self, worker: _Worker, order: dict[str, Any]) -> dict[str, str]:
        mine = {
            "RANK": worker.rank,
            "WORLD_SIZE": order["world"],
            "LOCAL_RANK": worker.slot,
            "LOCAL_WORLD_SIZE": len(order["ranks"]),
            "MASTER_ADDR": order["address"],
            "MASTER_PORT": order["port"],
            "TRUESTEP_LAUNCHER": "truestep",
            "TRUESTEP_HOST": worker.host,
            SUPERVISED: 1,
            counters.VARIABLE: self._counters,
            **stacks.variables(self._dumps),
        }
        if worker.door is not None:
            mine[ORDERS] = worker.door.path
        if (interface := _interface(order)) is not None:
            mine[INTERFACE] = interface
        mine |= self._keeper(worker.host, order)
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        return {**quiet, **os.environ, **order["variables"], **{name: str(value) for name, value in mine.items()}}

    def _keeper(self, host: str, order: dict[str, Any]) -> Mapping[str, str]:
        """Where this host keeps checkpoints in memory, if the supervisor gave a token for that: the address by which
        this group reaches it. A keeper outlives every worker and group, and is started anew if it is gone itself."""
        token = order["variables"].get(TOKEN)
        if token is None:
            return {}
        keeper = self._keepers.get(host)
        if keeper is None or keeper.process.poll() is not None:
            keeper = self._keepers[host] = Keeper(token, LOOPBACK if order["alone"] else "")
        return {ADDRESS: f"{order['mine']}:{keeper.port}", TOKEN: token}


def _interface(order: dict[str, Any]) -> str | None:
    """Where gloo is to listen. A wish of the user's holds between machines; on one, the loopback always works."""
    wish = None if order["address"].startswith("127.") else os.environ.get(INTERFACE)
    return wish or interface_of(order["mine"])
