"""A polite stop: the first SIGINT or SIGTERM asks for a stop after the step, a second SIGINT ends the process."""

import os
import signal
from types import FrameType


class StopSignal:
    """`asked` is read once a step and agreed over all ranks. Use as a context manager; old handlers come back."""

    def __init__(self):
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            # Nothing can be corrupted: only committed checkpoints count, and a commit is a single create-only object.
            os._exit(128 + number)
        self.asked = True
