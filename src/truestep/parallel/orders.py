"""How a worker whose group broke gets its place in the next one, without a new start. Torch-free.

The agent of a machine listens at a unix socket, whose path its workers have in TRUESTEP_ORDERS. A worker that has torn
its groups down connects and says why, one line of JSON:

    {"why": "rank 1 is gone"}

The answer, when the agent has it, is one line:

    {"rank": 1, "world": 3, "local_rank": 1, "local_world": 3, "master_addr": "127.0.0.1", "master_port": 41233}

and "interface", where it is known which one of this machine leads to the group, and "keeper", where the group reaches
this host's checkpoints in memory; or {"exit": true}. A connection that closes without a line means the same.
"""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from truestep.parallel.environment import Place

VARIABLE = "TRUESTEP_ORDERS"


@dataclass(frozen=True)
class Orders:
    """The worker's side."""

    path: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Orders | None":
        """None where no agent has offered to give any."""
        return cls(Path(environ[VARIABLE])) if environ.get(VARIABLE) else None

    def ask(self, why: str) -> Place | None:
        """Wait for a place in the next group, as long as the agent lives. None: end."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(self.path))
            line.sendall(json.dumps({"why": why}).encode() + b"\n")
            answer = line.makefile("rb").readline()
        return _place(json.loads(answer)) if answer else None


def _place(order: Mapping) -> Place | None:
    if order.get("exit"):
        return None
    numbers = (order[name] for name in ("rank", "world", "local_rank", "local_world"))
    master = (order["master_addr"], order["master_port"])
    return Place(
        *numbers, launcher="truestep", master=master, interface=order.get("interface"), keeper=order.get("keeper")
    )
