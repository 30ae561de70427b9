"""A job on the side: ranks of a command on this machine, awaited and ended together (a replay, a drill). Torch-free.

Nobody restarts them, and no rank outlives the process that started them.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from truestep.elastic.lifeline import PIPE
from truestep.elastic.ports import free_port
from truestep.parallel.environment import outside

POLL_S = 0.05
GRACE_S = 20.0
"""How long the others may go on after one has failed, to say what they have to say, before they are killed."""


def run_together(arguments: Sequence[str], processes: int, variables: Mapping[str, str]) -> int:
    """Run `python -m truestep` with `arguments` as ranks 0 … processes-1. Returns 0 if all ended with 0, else the first
    other exit code (negative: killed by that signal)."""
    lifeline, held = os.pipe()
    shared = outside(os.environ) | {"MASTER_PORT": str(free_port()), PIPE: str(lifeline)} | dict(variables)
    ranks = [_start(arguments, rank, processes, shared, lifeline) for rank in range(processes)]
    os.close(lifeline)

    def end(number: int, frame: FrameType | None) -> None:
        _signal(ranks, signal.SIGKILL)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _watch(ranks)
    finally:
        _signal(ranks, signal.SIGKILL)
        for rank in ranks:
            rank.wait()
        os.close(held)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    arguments: Sequence[str], rank: int, world: int, shared: Mapping[str, str], lifeline: int
) -> subprocess.Popen:
    mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    environ = {**shared, **{name: str(value) for name, value in mine.items()}, "MASTER_ADDR": "127.0.0.1"}
    environ["TRUESTEP_LAUNCHER"] = "truestep"
    if sys.platform.startswith("linux"):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "truestep", *arguments]
    return subprocess.Popen(command, env=environ, start_new_session=True, pass_fds=[lifeline])


def _watch(ranks: Sequence[subprocess.Popen]) -> int:
    failed, deadline = 0, float("inf")
    while True:
        codes = [rank.poll() for rank in ranks]
        if not failed and (bad := [code for code in codes if code]):
            failed, deadline = bad[0], time.monotonic() + GRACE_S
        if None not in codes:
            return failed
        if time.monotonic() > deadline:
            _signal(ranks, signal.SIGKILL)
        time.sleep(POLL_S)


def _signal(ranks: Sequence[subprocess.Popen], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)
