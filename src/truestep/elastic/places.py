"""Which hosts a machine stands for, and how its workers are started. Torch-free."""

import os
import socket
from collections.abc import Mapping

from truestep.recipe.machine import Machine

HOSTS = "TRUESTEP_HOSTS"
"""Names of hosts, with commas: this machine stands for all of them, as in tests and demonstrations."""


def hosts_here(environ: Mapping[str, str], processes: int) -> dict[str, int]:
    """The hosts of this machine, with the processes of each: itself, or those that the environment names."""
    names = [name.strip() for name in environ.get(HOSTS, "").split(",") if name.strip()]
    if not names:
        return {environ.get("TRUESTEP_HOST") or socket.gethostname(): processes}
    return dict.fromkeys(names, max(1, processes // len(names)))


def start_of(machine: Machine, gpus: int) -> tuple[str, bool]:
    """How workers are started, and whether the survivors of a failure may form a new group in place."""
    on_cpu = machine.device == "cpu" or (machine.device == "auto" and not gpus)
    chosen = machine.elastic.start
    start = chosen if chosen != "auto" else "fork" if on_cpu and hasattr(os, "fork") else "torchrun"
    return start, machine.elastic.regroup and on_cpu and start == "fork"
