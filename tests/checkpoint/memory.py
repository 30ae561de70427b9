"""A store in memory, quick enough for thousands of cases; its requests can be late, or lost, or their answers."""

from collections.abc import Callable, Iterable, Iterator

from truestep.errors import StorageError
from truestep.storage.interface import Data, Entry, KeyExists, MissingKey, silent


class MemoryStore:
    """Objects in a dict, with the contract of every store."""

    url = "memory"
    request_bytes = 1 << 20
    requests_at_once = 1

    def __init__(self, objects: dict[str, bytes] | None = None):
        self.objects = {} if objects is None else objects
        self.event = silent

    def change(self, key: str, effect: Callable[[], None]) -> None:
        """The one way by which anything changes."""
        effect()

    def put(self, key: str, data: Data) -> None:
        self.put_parts(key, [data], len(data))

    def put_parts(self, key: str, parts: Iterable[Data], size: int) -> int:
        whole = b"".join(parts)
        self.change(key, lambda: self.objects.update({key: whole}))
        return len(whole)

    def create(self, key: str, data: Data) -> None:
        whole = bytes(data)

        def effect() -> None:
            if key in self.objects:
                raise KeyExists(f"memory/{key}: exists already and was left as it is")
            self.objects[key] = whole

        self.change(key, effect)

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise MissingKey(f"memory/{key}: cannot read it: there is no such object")
        return self.objects[key]

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        data = self.get(key)
        if len(data) < stop:
            raise StorageError(f"memory/{key}: ends at byte {len(data)}, but byte {stop} is needed")
        return data[start:stop]

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        out[:] = self.get_range(key, start, start + len(out))

    def stream(self, key: str) -> Iterator[Data]:
        yield self.get(key)

    def list(self, prefix: str = "") -> list[Entry]:
        folder = prefix.rstrip("/") + "/" if prefix else ""
        return [Entry(key, len(data)) for key, data in sorted(self.objects.items()) if key.startswith(folder)]

    def head(self, key: str) -> Entry:
        return Entry(key, len(self.get(key)))

    def delete(self, key: str) -> None:
        self.get(key)
        self.change(key, lambda: self.objects.pop(key))


class PowerOff(BaseException):
    """The process is gone at this point; nothing that it would do later is done."""


class Requests(MemoryStore):
    """Counts the changes, and lets `meddle` (number of the change from 1, its effect) decide what becomes of each."""

    def __init__(self, objects: dict[str, bytes], meddle: Callable[[int, Callable[[], None]], None]):
        super().__init__(objects)
        self.meddle, self.changes = meddle, []

    def change(self, key: str, effect: Callable[[], None]) -> None:
        self.changes.append(key)
        self.meddle(len(self.changes), effect)
