"""What every store can do, and how it fails. A new kind of store is one new file that offers these methods."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from truestep.errors import StorageError

STREAM_BYTES = 8 << 20
Data = bytes | bytearray | memoryview
Event = Callable[[str], None]
"""Called with the name of a step of a protocol just before the next one begins; tests crash there."""


def silent(name: str) -> None:
    """The default event hook: does nothing."""


class MissingKey(StorageError):
    """There is no such object."""


class KeyExists(StorageError):
    """An object of this name is there already; it was left as it is."""


class Undurable(StorageError):
    """The object is there, whole, but the store could not make sure that it survives a power cut."""


@dataclass(frozen=True)
class Entry:
    """One object: its key below the store's root, its size in bytes and, where the store has one, its ETag."""

    key: str
    size: int
    etag: str | None = None


class Store(Protocol):
    """A flat map from key (`a/b/c`) to immutable bytes. All errors are StorageError in one sentence.

    An object becomes visible whole and durable, or not at all. What has a body here follows from the other methods; a
    store that inherits this may leave it out.
    """

    url: str
    event: Event
    request_bytes: int
    """A good size of one read."""
    requests_at_once: int
    """How many reads keep it busy."""

    def put(self, key: str, data: Data) -> None:
        """Store the bytes. Writers use a name only once; a local store refuses a second put of the same name."""
        self.put_parts(key, [data], len(data))

    def put_parts(self, key: str, parts: Iterable[Data], size: int) -> int:
        """Store `size` bytes that come in parts, without holding them all; returns how many there were."""
        ...

    def create(self, key: str, data: Data) -> None:
        """Store the bytes only if the name is free, decided atomically by the store; else KeyExists.

        After any other StorageError but Undurable the object may be there; if it can be read it is durable.
        """
        ...

    def get(self, key: str) -> bytes:
        return self.get_range(key, 0, self.head(key).size)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop); StorageError if the object ends before `stop`."""
        out = bytearray(stop - start)
        self.read_into(key, start, memoryview(out))
        return bytes(out)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` (writable, one byte an item) with the bytes from `start` on."""
        ...

    def stream(self, key: str) -> Iterator[Data]:
        """The whole object in pieces."""
        size = self.head(key).size
        for start in range(0, size, STREAM_BYTES):
            yield self.get_range(key, start, min(start + STREAM_BYTES, size))

    def list(self, prefix: str = "") -> list[Entry]:
        """Every object below the folder `prefix` (at any depth), sorted by key."""
        ...

    def head(self, key: str) -> Entry: ...

    def delete(self, key: str) -> None: ...


def remove(store: Store, key: str) -> None:
    """Delete an object; one that is not there is no loss."""
    try:
        store.delete(key)
    except MissingKey:
        return
