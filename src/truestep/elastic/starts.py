"""The two ways in which an agent starts workers: forked from a process that is ready, or under torchrun. Torch-free.

Both take `Work`, and tell of ends in the same words. A new way is one more class with these five methods, and a name in
`STARTS`.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from truestep.elastic.attempt import GONE
from truestep.elastic.lifeline import HOSTS, PIPE, SOCKET

CLOSE_S = 10.0


@dataclass(frozen=True)
class Work:
    """One worker to start: its number with this agent, its rank, and all variables of its environment."""

    number: int
    rank: int
    local_rank: int
    variables: dict[str, str]


@dataclass(frozen=True)
class Nodes:
    """Which machine of how many this is, and where rank 0 listens."""

    node: int
    nodes: int
    address: str
    port: int


@dataclass(frozen=True)
class Ended:
    number: int
    code: int


class Start(Protocol):
    """Starts, signals and watches the workers of one machine."""

    def start(self, works: list[Work], nodes: Nodes) -> None:
        """Start them; some may be running already."""
        ...

    def signal(self, number: int, signal_number: int) -> None:
        """Send a signal to a worker, if it lives."""
        ...

    def ends(self) -> list[Ended]:
        """Workers that have ended since the last call. Does not wait."""
        ...

    def pids(self) -> dict[int, int]:
        """Process identifiers of the workers that live, as far as they are known."""
        ...

    def close(self) -> None:
        """End every worker at once."""
        ...


@dataclass
class ForkStart:
    """Forks workers from `truestep.elastic.forkserver`. `arguments` are those of `python -m truestep`."""

    arguments: list[str]
    _pids: dict[int, int] = field(default_factory=dict)
    _alive: set[int] = field(default_factory=set)
    _partial: bytes = b""

    def __post_init__(self):
        self._lifeline, self._held = os.pipe()
        self._serve()

    def _serve(self) -> None:
        self._line, theirs = socket.socketpair()
        command = [sys.executable, "-m", "truestep.elastic.forkserver", str(theirs.fileno()), "truestep"]
        passed = [theirs.fileno(), self._lifeline]
        # The recipe on the command line is for those who look for the run's processes.
        environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}  # else each worker tells of the others' connections
        self._server = subprocess.Popen(
            [*command, *self.arguments], env=environ, pass_fds=passed, start_new_session=True
        )
        theirs.close()

    def start(self, works: list[Work], nodes: Nodes) -> None:
        for work in works:
            variables = work.variables | {PIPE: str(self._lifeline)}
            self._alive.add(work.number)
            self._tell(fork=work.number, arguments=self.arguments, variables=variables)

    def signal(self, number: int, signal_number: int) -> None:
        if number in self._alive:
            self._tell(signal=signal_number, to=number)

    def ends(self) -> list[Ended]:
        messages, broken = _received(self._line)
        *whole, self._partial = (self._partial + messages).split(b"\n")
        ended = [end for line in whole if (end := self._took(json.loads(line)))]
        return ended + self._again() if broken else ended

    def _took(self, message: dict[str, Any]) -> Ended | None:
        if "forked" in message:
            self._pids[message["forked"]] = message["pid"]
            return None
        self._alive.discard(message["ended"])
        self._pids.pop(message["ended"], None)
        return Ended(message["ended"], message["code"])

    def _again(self) -> list[Ended]:
        """The server is gone: nobody can tell of its children, so they are ended, and a new one is started."""
        lost, self._alive = sorted(self._alive), set()
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._pids.clear()
        self._server.wait()
        self._line.close()
        self._partial = b""
        self._serve()
        return [Ended(number, GONE) for number in lost]

    def _tell(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `ends` will notice
            self._line.sendall(json.dumps(message).encode() + b"\n")

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def close(self) -> None:
        for number in list(self._alive):
            self.signal(number, signal.SIGKILL)
        self._line.shutdown(socket.SHUT_WR)
        for descriptor in (self._lifeline, self._held):
            os.close(descriptor)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(CLOSE_S)
        self._server.kill()
        self._server.wait()
        self._line.close()


@dataclass
class TorchrunStart:
    """Starts all ranks of this machine under one torchrun, which is never to restart them. What torchrun does not tell
    (which process a rank is, how it ended) each worker says itself (`truestep.elastic.lifeline`)."""

    arguments: list[str]
    _numbers: dict[int, int] = field(default_factory=dict)  # rank -> number
    _pids: dict[int, int] = field(default_factory=dict)
    _lines: dict[socket.socket, dict[str, int]] = field(default_factory=dict)  # what each worker said of itself
    _torchrun: subprocess.Popen | None = None

    def __post_init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="truestep-")
        path = str(Path(self._folder.name) / "agent")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(path)
        self._door.listen(1024)
        self._door.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)

    def start(self, works: list[Work], nodes: Nodes) -> None:
        if self._torchrun is not None:
            self._torchrun.wait()
        self._numbers = {work.rank: work.number for work in works}
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes.nodes)]
        command += ["--node-rank", str(nodes.node), "--nproc-per-node", str(len(works)), "--max-restarts", "0"]
        command += ["--master-addr", nodes.address, "--master-port", str(nodes.port), "-m", "truestep"]
        hosts = ",".join(work.variables["TRUESTEP_HOST"] for work in works)
        mine = {SOCKET: self._door.getsockname(), HOSTS: hosts, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        theirs = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        variables = {name: value for name, value in works[0].variables.items() if name not in theirs}
        self._torchrun = subprocess.Popen([*command, *self.arguments], env=variables | mine, start_new_session=True)

    def signal(self, number: int, signal_number: int) -> None:
        if (pid := self._pids.get(number)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        elif signal_number == signal.SIGKILL and self._torchrun is not None and number in self._numbers.values():
            self._kill_group()  # a worker that has not said yet which process it is: all begin anew

    def ends(self) -> list[Ended]:
        ended = [end for key, _ in self._selector.select(0) if (end := self._ready(key.fileobj))]  # pyright: ignore[reportArgumentType]
        if self._torchrun is not None and self._torchrun.poll() is not None and not self._lines:
            code = self._torchrun.returncode
            ended += [Ended(number, GONE if code else 0) for number in self._numbers.values()]
            self._numbers, self._torchrun = {}, None
        return ended

    def _ready(self, line: socket.socket) -> Ended | None:
        if line is self._door:
            worker, _ = self._door.accept()
            worker.setblocking(False)
            self._selector.register(worker, selectors.EVENT_READ)
            self._lines[worker] = {}
            return None
        messages, broken = _received(line)
        said = self._lines[line]
        for message in messages.splitlines():
            said |= json.loads(message)
        number = self._numbers.get(said.get("rank", -1))
        if number is not None:
            self._pids[number] = said["pid"]
        if not broken:
            return None
        self._selector.unregister(line)
        line.close()
        del self._lines[line]
        if number is None:
            return None
        del self._pids[number], self._numbers[said["rank"]]
        return Ended(number, said.get("code", GONE))

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def close(self) -> None:
        for line in self._lines:
            line.close()  # every worker ends itself
        if self._torchrun is not None:
            self._kill_group()
            self._torchrun.wait()
        self._selector.close()
        self._door.close()
        self._folder.cleanup()

    def _kill_group(self) -> None:
        assert self._torchrun is not None
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._torchrun.pid, signal.SIGKILL)


STARTS: dict[str, type[ForkStart] | type[TorchrunStart]] = {"fork": ForkStart, "torchrun": TorchrunStart}
"""Ways to start workers, by the name in `machine.elastic.start`."""


def _received(line: socket.socket) -> tuple[bytes, bool]:
    """What has come on a socket, and whether the other end is closed. Does not wait."""
    parts = []
    while True:
        try:
            part = line.recv(65536, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return b"".join(parts), False
        except ConnectionError:
            return b"".join(parts), True
        if not part:
            return b"".join(parts), True
        parts.append(part)
