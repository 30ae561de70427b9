"""Work that must not disturb what else this machine does. Torch-free."""

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

NICEST = 19
IDLE = ["-c", "3"]  # ionice: only when nobody else wants the disk


def lower() -> None:
    """Give this process, and those that it starts, the lowest priority: for the CPU, for the disk, and as the first to
    be killed where memory runs out."""
    os.nice(NICEST)
    if ionice := shutil.which("ionice"):
        subprocess.run([ionice, *IDLE, "-p", str(os.getpid())], check=False)
    with contextlib.suppress(OSError):  # where there is no such file, nobody is killed by its score
        Path("/proc/self/oom_score_adj").write_text("1000")


def free_memory_bytes() -> float:
    """What new programs may take of this host's memory; infinite where it does not say."""
    known = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", known.read_text()) if known.exists() else None
    return 1024.0 * int(match[1]) if match else float("inf")
