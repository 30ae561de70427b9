"""Who asks for a polite stop: signals, a notice that the machine will be taken away. Torch-free."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, the end of a preemption's patience, and what SLURM is asked to send before it (--signal)."""


@dataclass
class Warnings:
    """Signals that have come, and a file that may appear."""

    notice: Path | None = None
    _heard: list[int] = field(default_factory=list)
    _interrupts: int = 0
    _told: bool = False  # of the notice

    @property
    def twice(self) -> bool:
        """Whether somebody pressed Ctrl-C again: no more patience."""
        return self._interrupts > 1

    def new(self) -> str | None:
        """Why to stop, if there is a reason since the last call."""
        heard, self._heard = self._heard, []
        self._interrupts += heard.count(signal.SIGINT)
        if heard:
            return " and ".join(signal.Signals(number).name for number in heard)
        if not self._told and self.notice is not None and self.notice.exists():
            self._told = True
            return f"the notice {self.notice} says that this machine will be taken away"
        return None

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Take the signals instead of dying of them. In the main thread."""

        def hear(number: int, frame: FrameType | None) -> None:
            self._heard.append(number)

        before = {number: signal.signal(number, hear) for number in NUMBERS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
