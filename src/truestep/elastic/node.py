"""`truestep node`: a machine that takes part in a run whose supervisor is elsewhere. Torch-free.

It joins, starts and ends workers as it is told, and says how they are. When the supervisor cannot be heard any more its
workers end at once, whatever they do: the run may be going on without them by then. It then tries to join again, for as
long as a supervisor may take to come back.
"""

import os
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truestep.elastic.agent import Agent
from truestep.elastic.devices import ranks_here, visible_gpus
from truestep.elastic.machines import BEAT_S, LOST_S
from truestep.elastic.places import hosts_here
from truestep.elastic.stopping import Warnings
from truestep.elastic.wire import HELLO_S, Wire, WireError, address
from truestep.errors import UserError
from truestep.recipe.load import load

POLL_S = 0.02
RETRY_S = 1.0
PATIENCE_S = 600.0
"""How long a supervisor may be out of reach."""


@dataclass
class Node:
    """`supervisor` is host:port; `processes`: to run here, None as the recipe says."""

    supervisor: str
    token: bytes
    processes: int | None = None
    warnings: Warnings = field(default_factory=Warnings)
    _joined: bool = False
    _leaving: bool = False

    def run(self) -> None:
        """Until the run is over, or this machine is to leave."""
        with self.warnings.hearing():
            reached = time.monotonic()
            while True:
                wire = self._connect()
                if wire is not None:
                    done = self._serve(wire)
                    wire.close()
                    if done:
                        return
                    print(f"node: the supervisor {wire.broken}; workers were ended, trying to join again", flush=True)
                    reached = time.monotonic()
                if self.warnings.new() is not None:
                    return
                if time.monotonic() - reached > PATIENCE_S:
                    raise UserError(
                        f"no supervisor answers at {self.supervisor}; "
                        f"start `truestep run` with machine.elastic.listen there, or correct the address"
                    )
                time.sleep(RETRY_S)

    def _connect(self) -> Wire | None:
        try:
            line = socket.create_connection(address(self.supervisor), timeout=HELLO_S)
        except OSError:
            return None
        try:
            return Wire(line, self.token, server=False)
        except WireError as error:
            if self._joined:
                return None  # it was the right token before: the line broke
            raise UserError(f"{self.supervisor} did not let this machine in: {error}; use the run's token") from None

    def _serve(self, wire: Wire) -> bool:
        """Take part. True where the run is over for this machine, False where the supervisor is lost."""
        welcome = _first(wire)
        if welcome is None:
            return False
        with tempfile.TemporaryDirectory(prefix="truestep-") as folder:
            file = Path(folder) / "recipe.toml"
            file.write_text(welcome["recipe"])
            recipe = load(file)
            notice = recipe.machine.elastic.notice
            self.warnings.notice = Path(notice).expanduser() if notice else None
            asked, device = self.processes or recipe.machine.processes, recipe.machine.device
            hosts = hosts_here(os.environ, ranks_here(asked, device, visible_gpus(os.environ)))
            agent = Agent(hosts, welcome["start"], ["run", str(file)], welcome["regroup"])
            try:
                wire.send({"is": "joined", "machine": ",".join(hosts), "hosts": hosts})
                return self._follow(wire, agent)
            finally:
                agent.close()

    def _follow(self, wire: Wire, agent: Agent) -> bool:
        beaten = 0.0
        while wire.silent_s < LOST_S:
            broken = wire.broken is not None  # but its last words may wait to be heard
            for order in wire.received():
                if order["do"] == "bye":
                    return True
                if order["do"] == "refuse":
                    return self._refused(order["why"])
                self._joined = True
                agent.follow(order)
            if broken:
                return self._leaving
            for event in agent.events():
                wire.send(event)
            if (why := self.warnings.new()) is not None:
                if self.warnings.twice:
                    return True
                self._leaving = True
                wire.send({"is": "leaving", "why": why})
            if time.monotonic() - beaten > BEAT_S:
                beaten = time.monotonic()
                wire.send(agent.beat())
            time.sleep(POLL_S)
        wire.broken = f"has been silent for {wire.silent_s:.0f} s"
        return False

    def _refused(self, why: str) -> bool:
        if not self._joined:
            raise UserError(f"the supervisor at {self.supervisor} refused this machine: {why}")
        return False  # it has not noticed yet that the first connection broke


def _first(wire: Wire) -> dict[str, Any] | None:
    """The supervisor's welcome."""
    deadline = time.monotonic() + HELLO_S
    while time.monotonic() < deadline and not wire.broken:
        for message in wire.received():
            if message["do"] == "welcome":
                return message
        time.sleep(POLL_S)
    wire.broken = wire.broken or "said no welcome"
    return None
