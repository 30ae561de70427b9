"""Real supervised runs for tests: started as a person would, watched through their log and counters."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from truestep.errors import LogError
from truestep.recipe.dump import dump
from truestep.recipe.load import load
from truestep.runlog import counters
from truestep.runlog.log import read

from .. import small_run

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
TIMEOUT_S = 150


def write_recipe(folder: Path, processes: int = 2, machine: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The small run as a file. `changes` replace sections of the recipe."""
    body = small_run.with_machine(small_run.recipe(folder), processes=processes, **(machine or {}))
    file = folder / "recipe.toml"
    file.write_text(dump(load(body | changes)))
    return file


def start(
    *arguments: str, environment: dict[str, str] | None = None, before: Sequence[str] = (), output: Path | None = None
) -> subprocess.Popen:
    """`before` stands in front of the command; `output`: a file to add to, instead of a pipe."""
    command = [*before, sys.executable, "-m", *arguments]
    with output.open("a") if output else nullcontext() as file:
        pipes = {"stdout": file or subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=ENVIRONMENT | (environment or {}), start_new_session=True, **pipes)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def records(run_dir: Path, kind: str) -> list[Any]:
    return [r.data for r in read(run_dir) if r.kind == kind]


def wait_for(what: Callable[[], Any], *running: subprocess.Popen) -> Any:
    """Until `what()` is true, and that, while all these run. Looks at a run that is only just being made."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for process in running:
            assert process.poll() is None, f"ended too early: {process.communicate()[0]}"
        with suppress(LogError, FileNotFoundError):  # the log is only just being made
            if found := what():
                return found
        time.sleep(0.02)
    raise AssertionError("it did not come about")


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen, attempts: int = 1) -> None:
    """Until that many attempts have begun, and the newest of them has done that step."""

    def reached() -> bool:
        newest, done = 0, 0
        for record in read(run_dir):
            if record.kind == "attempt_start":
                newest, done = newest + 1, 0
            elif record.kind == "step":
                done = record.data.step
        return newest >= attempts and done >= step

    wait_for(reached, process)


def kill(file: Path, rank: int) -> None:
    """SIGKILL the process that is this rank now, by the counters in `file`."""
    pids = [row["pid"] for row in counters.read(file) if row["pid"] and row["rank"] == rank]
    alive = [pid for pid in pids if not counters.is_gone(pid)]
    os.kill(alive[-1], signal.SIGKILL)


def weights_digest(run_dir: Path) -> str:
    return json.loads((run_dir / "models" / "base" / "manifest.json").read_text())["weights"]
