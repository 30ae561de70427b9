"""One manifest, many places: data objects also on a host's disk and in keepers' memory. Torch-free.

The durable store alone decides what is committed; all other objects lie there and nowhere else. A nearer place holds
copies of data objects of the newest checkpoints, under the same keys. Writing to one may fail, which is an alarm and
not a failed save. Reading asks the nearest first; what is absent there or has a wrong digest is read from the next, and
a wrong digest is an alarm.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from truestep.checkpoint.sealed import parse_folder
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import Data, Entry, Store, remove
from truestep.storage.local import LocalStore

DURABLE = "store"
COPIED = "steps/"
KEPT_FOLDERS = 2
PATIENCE_S = 60.0
"""How long a save waits for a nearer place after the durable one has everything."""

Check = Callable[[memoryview], str | None]
"""What is wrong with bytes that were read ("bytes 0 to 64 of ... are not those that were saved"), or None."""


@dataclass(frozen=True)
class Place:
    """A nearer place: a short name ("memory", "disk", "memory of b") and its store."""

    name: str
    store: Store


class _Abandoned(Exception):
    """A copy is not wanted any more."""


class _Copy:
    """Writes one object to a nearer place, in a thread, from parts that are handed over as they come."""

    def __init__(self, place: Place, key: str, size: int):
        self.place, self.key, self.size = place, key, size
        self.parts: SimpleQueue[Data | None] = (
            SimpleQueue()
        )  # views of what the save holds anyway: no memory of its own
        self.abandoned = False
        self.error = ""
        self.thread = threading.Thread(target=self._run, name=f"copy to {place.name}", daemon=True)
        self.thread.start()

    def end(self, deadline: float) -> str | None:
        """All parts are handed over: wait; why there is no copy, or None."""
        self.parts.put(None)
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive():
            self.abandon()
            return f"no answer within {PATIENCE_S:g} s"
        return self.error or None

    def abandon(self) -> None:
        self.abandoned = True
        self.parts.put(None)

    def _run(self) -> None:
        try:
            # Names are used once, so an object of this name is of another run that bore the same name.
            remove(self.place.store, self.key)
            self.place.store.put_parts(self.key, self._take(), self.size)
        except Exception as error:  # whatever it is, there is no copy, and the save goes on
            self.error = str(error) or type(error).__name__

    def _take(self) -> Iterator[Data]:
        while (part := self.parts.get()) is not None and not self.abandoned:
            yield part
        if self.abandoned:
            raise _Abandoned


class Places:
    """A store whose data objects have copies nearby. writes: where this rank's objects are copied to. reads: where it
    looks, nearest first, before the durable store. alarm: told of copies that fail or are damaged."""

    def __init__(self, durable: Store, writes: Sequence[Place], reads: Sequence[Place], alarm: Callable[[str], None]):
        self.durable, self.writes, self.reads, self.alarm = durable, list(writes), list(reads), alarm
        self.url, self.event = durable.url, durable.event
        self.request_bytes, self.requests_at_once = durable.request_bytes, durable.requests_at_once
        self.bytes_read: dict[str, int] = {}
        self.damaged: set[tuple[str, str]] = set()
        self._held: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def begin_load(self) -> None:
        """Forget what earlier loads found; what the nearer places hold is asked anew."""
        self.bytes_read, self.damaged, self._held = {}, set(), {}

    def read_checked(self, key: str, start: int, out: memoryview, check: Check) -> None:
        """Fill `out` from the nearest place whose bytes pass `check`; CheckpointError if even the durable ones fail."""
        for place in self.reads:
            if key in self._holds(place):
                try:
                    _read(place.store, key, start, out, check)
                except (StorageError, CheckpointError) as error:
                    self._say(place, key, error)
                else:
                    return self._count(place.name, len(out))
        _read(self.durable, key, start, out, check)
        self._count(DURABLE, len(out))

    def put_parts(self, key: str, parts: Iterable[Data], size: int) -> int:
        if not key.startswith(COPIED) or not self.writes:
            return self.durable.put_parts(key, parts, size)
        copies = [_Copy(place, key, size) for place in self.writes]

        def handed_on() -> Iterator[Data]:
            for part in parts:
                for copy in copies:
                    copy.parts.put(part)
                yield part

        try:
            written = self.durable.put_parts(key, handed_on(), size)
        except BaseException:
            for copy in copies:
                copy.abandon()
            raise
        deadline = time.monotonic() + PATIENCE_S
        for copy in copies:
            if reason := copy.end(deadline):
                self.alarm(f"{key} has no copy in {copy.place.name}: {reason}")
            self._make_room(copy.place)
        return written

    def put(self, key: str, data: Data) -> None:
        self.durable.put(key, data)

    def create(self, key: str, data: Data) -> None:
        self.durable.create(key, data)

    def get(self, key: str) -> bytes:
        return self.durable.get(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self.durable.get_range(key, start, stop)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.durable.read_into(key, start, out)

    def stream(self, key: str) -> Iterator[Data]:
        return self.durable.stream(key)

    def list(self, prefix: str = "") -> list[Entry]:
        return self.durable.list(prefix)

    def head(self, key: str) -> Entry:
        return self.durable.head(key)

    def delete(self, key: str) -> None:
        self.durable.delete(key)

    def _holds(self, place: Place) -> set[str]:
        """What a place holds, asked once a load; nothing if it does not answer, which is an alarm."""
        with self._lock:
            if place.name not in self._held:
                try:
                    self._held[place.name] = {entry.key for entry in place.store.list(COPIED.rstrip("/"))}
                except StorageError as error:
                    self._held[place.name] = set()
                    self.alarm(f"no checkpoint can be read from {place.name}: {error}")
            return self._held[place.name]

    def _count(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self.bytes_read[name] = self.bytes_read.get(name, 0) + num_bytes

    def _say(self, place: Place, key: str, error: Exception) -> None:
        """A copy is of no use; once a load, however many of its blocks are damaged."""
        with self._lock:
            if (place.name, key) in self.damaged:
                return
            self.damaged.add((place.name, key))
        self.alarm(f"a copy in {place.name} is of no use, and the next place is asked: {error}")

    def _make_room(self, place: Place) -> None:
        """Keep the newest folders of a disk. A keeper does this by itself."""
        if not isinstance(place.store, LocalStore):
            return
        try:
            for folder in newest_first(place.store.root / "steps")[KEPT_FOLDERS:]:
                with contextlib.suppress(FileNotFoundError):  # another rank of this host may be at it
                    shutil.rmtree(folder)
        except OSError as error:
            self.alarm(f"older copies in {place.name} cannot be removed: {error}")


def newest_first(steps: Path) -> list[Path]:
    """Step folders by the order in which their saves began: by epoch, then by serial. Other names are left out."""
    if not steps.is_dir():
        return []
    found = [(*save, path) for path in steps.iterdir() if (save := parse_folder(f"steps/{path.name}"))]
    return [path for *_, path in sorted(found, key=lambda each: (each[0].epoch, each[1]), reverse=True)]


def read_checked(store: Store, key: str, start: int, out: memoryview, check: Check) -> None:
    """Fill `out` with bytes that pass `check`, from wherever a store has them; CheckpointError if they are damaged."""
    if isinstance(store, Places):
        store.read_checked(key, start, out, check)
    else:
        _read(store, key, start, out, check)


def _read(store: Store, key: str, start: int, out: memoryview, check: Check) -> None:
    store.read_into(key, start, out)
    if problem := check(out):
        raise CheckpointError(f"{store.url}/{key}: {problem}; the file is damaged")
