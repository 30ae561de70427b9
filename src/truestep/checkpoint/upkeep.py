"""After a save: read it back, mark what was found, and delete what the policy does not keep. Torch-free.

Rank 0 does this in a thread of low priority that reads for a part of the time only, so that no step waits for it.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from truestep.checkpoint.catalogue import list_committed
from truestep.checkpoint.marks import mark
from truestep.checkpoint.retention import Policy, Retained, retain
from truestep.checkpoint.sealed import Committed
from truestep.checkpoint.verify import Damage, unwatched, verify
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import Store

LOWEST_PRIORITY = 19
PATIENCE_S, LAST_WORDS_S = 10.0, 10.0
SHARE = 0.25
"""Part of the time that a low-priority scrub works; the rest it leaves to training."""


class Ended(Exception):
    """The thread is to end in the middle of a scrub."""


class Throttle:
    """For `verify`: waits after each read, so that reading takes up `SHARE` of the time; raises Ended when stopped."""

    def __init__(self, stopped: threading.Event):
        self.stopped, self.since = stopped, time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        worked_s = time.monotonic() - self.since
        if self.stopped.wait(worked_s * (1 / SHARE - 1)):
            raise Ended
        self.since = time.monotonic()


def verify_and_mark(store: Store, committed: Committed, watch: Callable[[int], None] = unwatched) -> list[Damage]:
    """Scrub a checkpoint and mark it: verified, or, if bytes are certainly wrong, quarantined. Returns the damage.

    One that the store did not answer for gets no mark, and one that was deleted meanwhile none either.
    """
    began = time.monotonic()
    damage = verify(store, committed, watch)
    if committed not in list_committed(store):
        return []
    if not damage:
        mark(store, committed, "verified", level="scrub", seconds=round(time.monotonic() - began, 3))
    elif any(each.certain for each in damage):
        first = next(each.text for each in damage if each.certain)
        more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
        mark(store, committed, "quarantined", reason=f"a scrub found: {first}{more}")
    return damage


@dataclass(frozen=True)
class Kept:
    """What came of one checkpoint: sentences on damage found, what retention did, what else went wrong."""

    committed: Committed
    damage: list[str] = field(default_factory=list)
    retained: Retained | None = None
    error: str = ""


class Upkeep:
    """Verifies and retains the checkpoints of one attempt, which began `epoch` and went on from those in `restored`."""

    def __init__(self, store: Store, policy: Policy, epoch: int, restored: Collection[str] = ()):
        self.store, self.policy, self.epoch, self.restored = store, policy, epoch, set(restored)
        self.results: SimpleQueue[Kept] = SimpleQueue()
        self.waiting: SimpleQueue[Committed | None] = SimpleQueue()
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def went_on_from(self, key: str) -> None:
        """The attempt loaded this commit, which is therefore never deleted."""
        self.restored.add(key)

    def after(self, key: str) -> None:
        """A save was committed under this key; returns at once."""
        self.waiting.put(Committed.parse(key))
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
            self.thread.start()

    def finished(self) -> list[Kept]:
        """What came of checkpoints since the last call."""
        found = []
        while True:
            try:
                found.append(self.results.get_nowait())
            except Empty:
                return found

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Give the thread so long to do what is waiting. A scrub that is cut short is not made up for: a drill or
        `truestep checkpoints verify` reads what has no mark yet."""
        self.waiting.put(None)
        if self.thread is not None:
            self.thread.join(patience_s)
        self.stop()

    def stop(self) -> None:
        """End a scrub under way."""
        self.stopped.set()
        self.waiting.put(None)
        if self.thread is not None:
            self.thread.join(LAST_WORDS_S)

    def _run(self) -> None:
        if sys.platform.startswith("linux"):  # where it is a matter of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        while (committed := self.waiting.get()) is not None and not self.stopped.is_set():
            try:
                self.results.put(self._keep(committed))
            except Ended:
                return

    def _keep(self, committed: Committed) -> Kept:
        try:
            damage = verify_and_mark(self.store, committed, Throttle(self.stopped))
        except (CheckpointError, StorageError) as error:
            return Kept(committed, error=str(error))
        told = [each.text for each in damage if each.certain]
        if unread := [each.text for each in damage if not each.certain]:
            return Kept(committed, told, error=unread[0])
        try:
            return Kept(committed, told, retain(self.store, self.policy, self.restored, epoch=self.epoch))
        except (CheckpointError, StorageError) as error:
            return Kept(committed, told, error=str(error))
