"""Lets a rank that hangs say what it is doing: its stacks on a signal, and its last collectives on request.

The launcher names a folder in TRUESTEP_DUMPS (truestep.elastic.stacks). The signal is answered by C code that needs no
interpreter; the collectives by a thread, so not while something holds the interpreter.
"""

import faulthandler
import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from truestep.files import publish

VARIABLE, ASK = "TRUESTEP_DUMPS", "ask"
LOOK_S = 0.5


class Witness:
    """From `of` to `close`; one for the whole life of a process."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._over = folder, threading.Event()
        self._file: IO[bytes] = (folder / f"{os.getpid()}.stack").open("ab")
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)
        self._thread = threading.Thread(target=self._look, name="witness", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Witness | None":
        """None where nobody wants to know."""
        return cls(Path(environ[VARIABLE])) if environ.get(VARIABLE) else None

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        self._file.close()

    def _look(self) -> None:
        answered = False
        while not self._over.wait(LOOK_S):
            asked = (self._folder / ASK).exists()
            if asked and not answered:
                publish(self._folder / f"{os.getpid()}.flight", flight_record())
            answered = asked


def flight_record() -> bytes:
    """PyTorch's record of the last collectives of this process: by backend, JSON."""
    # Private, and the only way to ask for it outside of a time-out of NCCL's; there from 2.11 to 2.13.
    private: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    found = {"gloo": json.loads(private._dump_fr_trace_json())}
    if dist.is_nccl_available():
        found["nccl"] = json.loads(private._dump_nccl_trace_json())
    return json.dumps(found).encode()
