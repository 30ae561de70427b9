"""What a hanging rank is doing, for a person to read: the stacks of its threads, and its last collectives. Torch-free.

    <folder>/rank-<r>.txt       stacks, by py-spy if that is installed, else by the rank's own faulthandler
    <folder>/rank-<r>.flight    PyTorch's flight recorder (the last collectives), which the rank writes itself

The workers learn of the folder from TRUESTEP_DUMPS (truestep.parallel.witness); `variables` is what their launcher adds
to their environment.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from truestep.elastic.watcher import Verdict

FOLDER = "TRUESTEP_DUMPS"
ASK = "ask"
"""File in the folder whose appearance lets every rank write down its last collectives."""
SIGNAL = signal.SIGUSR2
WAIT_S = 2.0
"""How long a rank may take to answer. One whose process is stopped does not."""
COLLECTIVES = 2000
PY_SPY_S = 10.0


def variables(folder: Path) -> dict[str, str]:
    """For the workers whose dumps are to lie in `folder`: where, and that PyTorch keeps a record of collectives."""
    return {FOLDER: str(folder), "TORCH_FR_BUFFER_SIZE": str(COLLECTIVES)}


def dump(pids: Mapping[int, int], asked: Path, into: Path) -> Path:
    """Write down what the processes of some ranks (rank -> pid, of this machine) are doing, into the folder `into`.
    `asked`: the folder that they were told of. Returns `into`."""
    into.mkdir(parents=True, exist_ok=True)
    asked.mkdir(parents=True, exist_ok=True)
    (asked / ASK).touch()
    spy = shutil.which("py-spy")
    before = {rank: _size(_own(asked, pid)) for rank, pid in pids.items()}
    if spy is None:
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
    deadline = time.monotonic() + WAIT_S
    for rank, pid in pids.items():
        text = _spied(spy, pid) if spy is not None else _written(_own(asked, pid), before[rank], deadline)
        (into / f"rank-{rank}.txt").write_text(_state(pid) + text)
    for rank, pid in pids.items():
        flight = asked / f"{pid}.flight"
        if _appears(flight, deadline):
            shutil.move(flight, into / f"rank-{rank}.flight")
    (asked / ASK).unlink(missing_ok=True)
    return into


def by_flight(folder: Path) -> Verdict:
    """Whom the records of collectives single out: the one rank that has not begun a collective of a group which all
    others of the group have begun. It is told by the groups' own numbers, so it holds for every backend."""
    begun: dict[tuple[str, str], dict[int, int]] = {}
    for file in sorted(folder.glob("rank-*.flight")):
        rank = int(file.stem.removeprefix("rank-"))
        for backend, record in json.loads(file.read_bytes()).items():
            for entry in record.get("entries", []):
                if not entry["is_p2p"]:
                    counts = begun.setdefault((backend, entry["process_group"][0]), {})
                    counts[rank] = max(counts.get(rank, 0), entry["collective_seq_id"])
    for (backend, group), counts in begun.items():
        behind = [rank for rank, count in counts.items() if count < max(counts.values())]
        if len(behind) == 1 < len(counts):
            why = f"has begun {counts[behind[0]]} collectives of group {group} ({backend})"
            return Verdict(behind[0], f"{why}, the others {max(counts.values())}")
    return Verdict(None, "")


def _own(folder: Path, pid: int) -> Path:
    """Where the faulthandler of a process writes."""
    return folder / f"{pid}.stack"


def _spied(spy: str, pid: int) -> str:
    try:
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=PY_SPY_S)
    except subprocess.TimeoutExpired:
        return f"py-spy had no answer after {PY_SPY_S:.0f} s\n"
    return done.stdout or f"py-spy: {done.stderr}"


def _written(file: Path, before: int, deadline: float) -> str:
    """What is new in a file, once nothing more is added to it."""
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        grown = _size(file)
        if grown > before and grown == size:
            return file.read_bytes()[before:].decode(errors="replace")
        size = grown
    return "no stack: the process does not answer (it is stopped, or its faulthandler was taken away)\n"


def _appears(file: Path, deadline: float) -> bool:
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return file.exists()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _state(pid: int) -> str:
    """State of the process and what its main thread waits for in the kernel, as far as the system tells."""
    found = []
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        found = [line for line in status.splitlines() if line.startswith(("Name:", "State:", "Threads:", "VmRSS:"))]
        found.append("Waits:\t" + (Path(f"/proc/{pid}/wchan").read_text() or "0"))
    return "".join(f"{line}\n" for line in (f"Pid:\t{pid}", *found)) + "\n"
