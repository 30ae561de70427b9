"""A save under way, and how it ended."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from truestep.checkpoint.control import Round

GRACE_S = 0.5  # after the deadline, for the save's own thread to say why


@dataclass(frozen=True)
class SaveResult:
    """How a save ended: `stall_s` in the caller, `total_s` until the commit, bytes of all ranks, or why it failed.
    `superseded`: a newer attempt has begun, so no later save of this one can succeed. `fingerprints`: of every tensor
    that was saved, on rank 0."""

    step: int
    ok: bool
    stall_s: float = 0.0
    total_s: float = 0.0
    num_bytes: int = 0
    commit: str = ""
    manifest_sha256: str = ""
    error: str = ""
    superseded: bool = False
    fingerprints: Mapping[str, int] = field(default_factory=dict)


class Pending:
    """A save under way. It ends once: by its own thread, or at the deadline by whoever finds that the store keeps that
    thread for too long. `stall_s`: what it cost the caller, None if all of it."""

    def __init__(self, step: int, talk: Round, began: float, stall_s: float | None):
        self.step, self.round, self.began, self.stall_s = step, talk, began, stall_s
        self.future: Future[SaveResult] = Future()
        self.given_up = False
        self.released = threading.Event()  # what the save reads of the caller's own tensors was read
        self._once = threading.Lock()

    def end(self, result: SaveResult) -> None:
        """Whoever comes second changes nothing."""
        with self._once:
            if not self.future.done():
                total_s = time.monotonic() - self.began
                stall_s = total_s if self.stall_s is None else self.stall_s
                self.future.set_result(replace(result, total_s=total_s, stall_s=stall_s))

    def result(self) -> SaveResult:
        """Wait for the end: at most until a moment after the deadline."""
        try:
            return self.future.result(max(0.0, self._latest - time.monotonic()))
        except TimeoutError:
            return self.give_up()

    @property
    def overdue(self) -> bool:
        return not self.future.done() and time.monotonic() > self._latest

    @property
    def _latest(self) -> float:
        return self.round.deadline + GRACE_S

    def give_up(self) -> SaveResult:
        """The thread is stuck in the store. It commits nothing even if it comes back: it looks at the deadline first.
        Its staging buffers stay its own."""
        self.given_up = True
        text = f"the store has not taken it within {self.round.group.deadline_s:g} s"
        self.end(SaveResult(self.step, False, error=text))
        self.round.fail(text)
        return self.future.result()


@dataclass(frozen=True)
class Save:
    """A save that was begun."""

    step: int
    stall_s: float
    pending: Pending

    def result(self) -> SaveResult:
        """Wait for the end. A failed save is a result, not an exception: the run may go on."""
        return self.pending.result()
