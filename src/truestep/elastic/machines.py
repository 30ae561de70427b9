"""Machines as the supervisor sees them: its own, and those that join over the network. Torch-free."""

import queue
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from truestep.elastic.agent import Agent
from truestep.elastic.ports import free_port
from truestep.elastic.wire import Wire, WireError, address
from truestep.errors import UserError

BEAT_S = 1.0
LOST_S = 10.0
"""Silence after which a machine is taken to be lost, and a machine takes its supervisor to be lost."""
HERE = "here"


class Machine(Protocol):
    """An agent, near or far, and the hosts that it stands for."""

    @property
    def name(self) -> str: ...

    @property
    def hosts(self) -> Mapping[str, int]: ...

    @property
    def address(self) -> str | None:
        """Where other machines reach it; None for the supervisor's own, which does not know."""
        ...

    @property
    def found_at(self) -> str | None:
        """Where it has found the supervisor's machine."""
        ...

    def follow(self, order: dict[str, Any]) -> None: ...

    def events(self) -> list[dict[str, Any]]:
        """What happened there since the last call."""
        ...

    def port(self) -> int | None:
        """A port that is free there; None: ask again in a second."""
        ...

    def rows(self) -> list[dict[str, int]]:
        """The counters of its workers, as of the last sign of life."""
        ...

    def lost(self) -> str | None:
        """Why it is gone, in words that follow its name; None while it is there."""
        ...

    def drop(self) -> None:
        """It is lost; what may be left of it ends itself."""
        ...

    def close(self) -> None:
        """End its workers, and let it go."""
        ...


@dataclass
class Here:
    """The supervisor's own machine."""

    agent: Agent
    name: str = HERE
    address: str | None = None
    found_at: str | None = None

    @property
    def hosts(self) -> Mapping[str, int]:
        return self.agent.hosts

    def follow(self, order: dict[str, Any]) -> None:
        self.agent.follow(order)

    def events(self) -> list[dict[str, Any]]:
        return self.agent.events()

    def port(self) -> int | None:
        return free_port()

    def rows(self) -> list[dict[str, int]]:
        return self.agent.beat()["rows"]

    def lost(self) -> str | None:
        return None

    def drop(self) -> None:
        self.close()

    def close(self) -> None:
        self.agent.close()


@dataclass
class There:
    """A machine that joined."""

    wire: Wire
    name: str
    hosts: Mapping[str, int]
    _beat: dict[str, Any] = field(default_factory=dict)
    _used_port: int | None = None
    _beaten: float = 0.0

    @property
    def address(self) -> str:
        return self.wire.peer

    @property
    def found_at(self) -> str:
        return self.wire.here

    def follow(self, order: dict[str, Any]) -> None:
        self.wire.send(order)

    def events(self) -> list[dict[str, Any]]:
        if time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            self.wire.send({"do": "beat"})
        told = self.wire.received()
        for beat in (event for event in told if event["is"] == "beat"):
            self._beat = beat
        return [event for event in told if event["is"] != "beat"]

    def port(self) -> int | None:
        port = self._beat.get("port")
        if port == self._used_port:
            return None
        self._used_port = port
        return port

    def rows(self) -> list[dict[str, int]]:
        return self._beat.get("rows", [])

    def lost(self) -> str | None:
        if self.wire.broken:
            return self.wire.broken
        if self.wire.silent_s > LOST_S:
            return f"has been silent for {self.wire.silent_s:.0f} s"
        return None

    def refuse(self, why: str) -> None:
        """Turn the machine away."""
        self.wire.send({"do": "refuse", "why": why})
        self.wire.finish()

    def drop(self) -> None:
        self.wire.close()

    def close(self) -> None:
        self.wire.send({"do": "bye"})
        self.wire.finish()


class Hub:
    """Listens where `machine.elastic.listen` says; machines that prove themselves and say who they are come out of
    `joined`. `welcome` is what each is told first."""

    def __init__(self, listen: str, token: bytes, welcome: dict[str, Any]):
        self._token, self._welcome = token, welcome
        self._turned_away: set[str] = set()
        self._joined: queue.Queue[There] = queue.Queue()
        try:
            self._door = socket.create_server(address(listen))
        except OSError as error:
            raise UserError(
                f"machine.elastic.listen {listen!r} cannot be listened at ({error.strerror or error}); "
                f"give an address of this machine and a port that is free"
            ) from None
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._accept, name="hub", daemon=True).start()

    def joined(self) -> list[There]:
        """Machines that have come since the last call."""
        found = []
        while not self._joined.empty():
            found.append(self._joined.get())
        return found

    def close(self) -> None:
        self._door.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._door.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._meet, args=(line,), name="hub", daemon=True).start()

    def _meet(self, line: socket.socket) -> None:
        peer = line.getpeername()[0]
        try:
            wire = Wire(line, self._token, server=True)
        except WireError as error:
            if peer not in self._turned_away:  # who knocks again and again is told of once
                self._turned_away.add(peer)
                print(f"supervisor: somebody at {peer} was turned away: {error}", flush=True)
            return
        wire.send(self._welcome)
        while not wire.broken and wire.silent_s < LOST_S:
            for told in wire.received():
                if told["is"] == "joined":
                    hosts = {str(name): int(processes) for name, processes in told["hosts"].items()}
                    self._joined.put(There(wire, str(told["machine"]), hosts))
                    return
            threading.Event().wait(0.02)
        wire.close()
