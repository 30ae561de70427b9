"""In a worker: the ties to the agent that started it. Torch-free.

A worker dies with its agent, however that dies: it holds the reading end of a pipe that the agent never writes to, or,
where torchrun stands between the two, a connection to a socket of the agent. On that it also says which process it is
and how it ends, which torchrun would not tell.
"""

import json
import os
import signal
import socket
import threading

PIPE = "TRUESTEP_LIFELINE"
SOCKET = "TRUESTEP_AGENT"
HOSTS = "TRUESTEP_HOSTS_HERE"
"""Names of the hosts of this machine's local ranks, where one start (torchrun) covers several; else TRUESTEP_HOST."""
_lines: list[socket.socket] = []


def die_with_launcher() -> None:
    """End at once when the agent is gone, however it went. Without an agent of ours, nothing."""
    pipe, path = os.environ.pop(PIPE, None), os.environ.pop(SOCKET, None)
    hosts = os.environ.pop(HOSTS, None)
    if hosts:
        os.environ["TRUESTEP_HOST"] = hosts.split(",")[int(os.environ["LOCAL_RANK"])]
    if pipe is not None:
        _watch(int(pipe))
    elif path is not None:
        line = socket.socket(socket.AF_UNIX)
        line.connect(path)
        _lines.append(line)
        _tell(line, rank=int(os.environ["RANK"]), pid=os.getpid())
        _watch(line.fileno())


def say_end(code: int) -> None:
    """The last word of a worker, if somebody listens: its exit code."""
    for line in _lines:
        _tell(line, code=code)


def _watch(descriptor: int) -> None:
    def watch() -> None:
        os.read(descriptor, 1)  # returns when the other end is closed, which the kernel does for a dead process
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _tell(line: socket.socket, **message: int) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")
