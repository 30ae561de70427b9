"""How a worker whose group broke gets its place in the next one, without a new start. Torch-free.

The agent of a machine listens at a unix socket, whose path its workers have in TRUESTEP_ORDERS. A worker that has torn
its groups down connects and says who it is, one line of JSON:

    {"pid": 4711, "rank": 2, "local_rank": 2, "why": "rank 1 is gone"}

The answer, when the agent has it, is one line:

    {"rank": 1, "world": 3, "local_rank": 1, "local_world": 3, "master_addr": "127.0.0.1", "master_port": 41233}

and "interface", where it is known which one of this machine leads to the group; or {"exit": true}. A connection that
closes without a line means the same.
"""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from truestep.parallel.environment import Place

VARIABLE = "TRUESTEP_ORDERS"


@dataclass(frozen=True)
class Left:
    """A worker that has left its group: who it was there, and why. `again`, `without`: see errors.Again."""

    pid: int
    rank: int
    local_rank: int
    why: str


@dataclass(frozen=True)
class Orders:
    """The worker's side."""

    path: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Orders | None":
        """None where no agent has offered to give any."""
        return cls(Path(environ[VARIABLE])) if environ.get(VARIABLE) else None

    def ask(self, left: Left) -> Place | None:
        """Wait for a place in the next group, as long as the agent lives. None: end."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(self.path))
            line.sendall(json.dumps(asdict(left)).encode() + b"\n")
            answer = line.makefile("rb").readline()
        return _place(json.loads(answer)) if answer else None


def _place(order: Mapping) -> Place | None:
    if order.get("exit"):
        return None
    numbers = (order[name] for name in ("rank", "world", "local_rank", "local_world"))
    master = (order["master_addr"], order["master_port"])
    return Place(*numbers, launcher="truestep", master=master, interface=order.get("interface"))
