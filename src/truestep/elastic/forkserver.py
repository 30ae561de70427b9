"""A process that has imported everything and forks workers on order: a start takes tenths of a second instead of the
seconds that `import torch` takes.

It never touches CUDA and has one thread only, since a child inherits nothing but the thread that forks. It is told what
to do in JSON lines on the socket that it was given, and tells what became of its children in the same way:

    → {"fork": 7, "arguments": ["run", "x.toml"], "variables": {...}}    ← {"forked": 7, "pid": 4711}
    → {"signal": 15, "to": 7}                                            ← {"ended": 7, "code": -15}

When the other end is closed it ends; its children have a lifeline of their own (truestep.elastic.lifeline). A child
goes on as `python -m MODULE ARGUMENTS...` would.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

from truestep.elastic.attempt import CRASHED

PRELOAD = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "truestep.stages.run")
"""What training imports; the first two import themselves late, when they are used."""


@dataclass
class Server:
    """The parent's loop. `serve` returns twice over: in the parent when the other end is closed, with None; in every
    child with what it is to run."""

    line: socket.socket
    children: dict[int, int] = field(default_factory=dict)  # pid -> number of the order
    _partial: bytes = b""

    def serve(self) -> dict[str, Any] | None:
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # that the descriptor below is written to at all
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self.line, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
                self._reap()
            if self.line in ready:
                read = self.line.recv(65536)
                if not read:
                    return None
                for order in self._lines(read):
                    task = self._follow(order)
                    if task is not None:
                        os.close(woken)
                        os.close(wake)
                        return task

    def _lines(self, read: bytes) -> list[dict[str, Any]]:
        *whole, self._partial = (self._partial + read).split(b"\n")
        return [json.loads(line) for line in whole]

    def _follow(self, order: dict[str, Any]) -> dict[str, Any] | None:
        if "fork" in order:
            return self._fork(order)
        for pid, number in self.children.items():
            if number == order["to"]:
                os.kill(pid, order["signal"])  # not reaped yet, so the identifier is still its own
        return None

    def _fork(self, order: dict[str, Any]) -> dict[str, Any] | None:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            self.line.close()
            return order
        self.children[pid] = order["fork"]
        self._tell(forked=order["fork"], pid=pid)
        return None

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._tell(ended=self.children.pop(pid), code=os.waitstatus_to_exitcode(status))

    def _tell(self, **message: Any) -> None:
        self.line.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    """`python -m truestep.elastic.forkserver DESCRIPTOR MODULE`."""
    line = socket.socket(fileno=int(sys.argv[1]))
    module = sys.argv[2]
    sys.path.append(os.getcwd())  # as the command line does
    for name in PRELOAD:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)  # a pool of OpenMP threads would be lost in the fork, and waited for
    gc.collect()
    gc.freeze()  # what was imported is never garbage, and its pages stay shared
    task = Server(line).serve()
    if task is not None:
        os.environ.clear()
        os.environ.update(task["variables"])
        sys.argv = [module, *task["arguments"]]
        _leave(_run(module))


def _run(module: str) -> int:
    """Run a module as `python -m` does; its exit code, where that of an error of the program is none of a gate."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:  # before the command line takes it
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return CRASHED
    return 0


def _leave(code: int) -> None:
    """End as the interpreter does, but for taking every module apart, which takes a second where torch is loaded."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
