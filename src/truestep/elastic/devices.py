"""How many GPUs this machine lets a run use, without asking a driver library. Torch-free."""

import re
from collections.abc import Mapping
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA device files, or those of them that CUDA_VISIBLE_DEVICES leaves. 0 where there are none."""
    present = sum(1 for entry in devices.iterdir() if _GPU.fullmatch(entry.name)) if devices.is_dir() else 0
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    listed = [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    return min(present, len(listed))


def ranks_here(processes: int, device: str, gpus: int) -> int:
    """Ranks to start on this machine: with device "auto" no more than it has GPUs, if it has any."""
    return min(processes, gpus) if device == "auto" and gpus else processes
