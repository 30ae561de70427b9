"""Where a worker whose group broke waits for its place in a new one. Torch-free.

Both sides say one line (truestep.parallel.orders): the worker why it left, the agent its new place.
"""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any


class Door:
    """One worker's socket, for as long as it lives."""

    def __init__(self, path: Path):
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._line: socket.socket | None = None
        self._said: bytes = b""

    @property
    def open(self) -> bool:
        """Whether the worker waits now, and has said why."""
        return self._said.endswith(b"\n")

    def knocked(self) -> dict[str, Any] | None:
        """What a worker says that has begun to wait since the last call. Does not wait."""
        if self.open:
            return None
        with contextlib.suppress(BlockingIOError):
            if self._line is None:
                self._line, _ = self._listener.accept()
                self._line.setblocking(False)
            self._said += self._line.recv(65536)
        return json.loads(self._said) if self.open else None

    def answer(self, order: dict[str, Any]) -> None:
        """Let the worker go on. One that died meanwhile is told of by its exit."""
        assert self._line is not None
        with contextlib.suppress(OSError):
            self._line.sendall(json.dumps(order).encode() + b"\n")
        self._line.close()
        self._line, self._said = None, b""

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._listener.close()
        self.path.unlink(missing_ok=True)
