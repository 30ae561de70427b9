"""Starts one process a rank on this machine and watches them. Torch-free.

Each worker is the same command with the variables of a job set, in a session of its own, so that Ctrl-C reaches only
the launcher: the first asks every worker to stop after its step, the second kills them. A worker that fails takes
the others with it, and its exit code becomes the launcher's. A launcher that dies, however it dies, takes its workers
along: each holds the reading end of a pipe that the launcher never writes to.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

LIFELINE = "TRUESTEP_LIFELINE"
POLL_S = 0.05
GRACE_S = 20.0
"""How long the others may go on after one has failed, to say what they have to say, before they are killed."""


@dataclass
class Workers:
    """The running ranks of one attempt."""

    processes: list[subprocess.Popen]
    interrupts: int = 0

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        self.signal(signal.SIGINT if self.interrupts == 1 else signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(command: list[str], processes: int, variables: Mapping[str, str]) -> int:
    """Run `command` as ranks 0 … processes-1, with `variables` added to their environment, and return the job's exit
    code: 0 if all ended with 0, else the first other (negative: killed by that signal)."""
    lifeline, held = os.pipe()
    shared = os.environ | {"MASTER_PORT": str(free_port()), LIFELINE: str(lifeline)} | dict(variables)
    workers = Workers([_start(command, rank, processes, shared, lifeline) for rank in range(processes)])
    os.close(lifeline)
    before = {number: signal.signal(number, workers.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _watch(workers)
    finally:
        workers.signal(signal.SIGKILL)
        for process in workers.processes:
            process.wait()
        os.close(held)
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_launcher() -> None:
    """In a worker: end at once when the launcher is gone. Without a launcher of ours, nothing."""
    lifeline = os.environ.pop(LIFELINE, None)
    if lifeline is None:
        return

    def watch() -> None:
        os.read(int(lifeline), 1)  # returns when the other end is closed, which the kernel does for a dead process
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _start(command: list[str], rank: int, world: int, shared: Mapping[str, str], lifeline: int) -> subprocess.Popen:
    mine = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "TRUESTEP_LAUNCHER": "truestep",
    }
    if sys.platform.startswith("linux"):
        mine["GLOO_SOCKET_IFNAME"] = shared.get("GLOO_SOCKET_IFNAME", "lo")
    return subprocess.Popen(command, env={**shared, **mine}, start_new_session=True, pass_fds=[lifeline])


def _watch(workers: Workers) -> int:
    failed: int | None = None
    deadline = 0.0
    while True:
        codes = [process.poll() for process in workers.processes]
        if failed is None:
            bad = [code for code in codes if code not in (None, 0)]
            if bad:
                failed, deadline = bad[0], time.monotonic() + GRACE_S
        if all(code is not None for code in codes):
            return failed if failed is not None else 0
        if failed is not None and time.monotonic() > deadline:
            workers.signal(signal.SIGKILL)
        time.sleep(POLL_S)
