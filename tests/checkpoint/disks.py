"""Disks for tests: one that notes every call, and what a power cut after any of them may leave; one whose calls fail.

What a power cut leaves follows POSIX alone, not a kind of file system. Bytes are safe once their file was synced, names
once their folder was; nothing follows from the other. Of what is not safe anything may be there: any name without any
other, a file without its bytes, with zeros or with some of its pages.
"""

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkpoint.memory import PowerOff
from truestep.storage.disk import Disk

PAGE = 4096


@dataclass(frozen=True)
class Call:
    """One call, when it ended, and on which file: paths, or the number of a handle of a process."""

    at_ns: int
    kind: str
    path: str = ""
    new: str = ""
    file: tuple[int, int] = (0, 0)
    data: bytes = b""


class Recorder(Disk):
    """Does everything for real and notes what changes something. At call number `off_at` the process is gone."""

    def __init__(self, process: int = 0, off_at: int = 0):
        self.calls: list[Call] = []
        self.process, self.off_at, self.files = process, off_at, itertools.count()
        self._file_of: dict[int, tuple[int, int]] = {}

    def note(self, kind: str, path: object = "", new: object = "", **what) -> None:
        self.calls.append(Call(time.monotonic_ns(), kind, str(path), str(new), **what))

    def _alive(self) -> None:
        if self.off_at and len(self.calls) + 1 >= self.off_at:
            raise PowerOff

    def create(self, path: Path) -> int:
        self._alive()
        handle = super().create(path)
        self._file_of[handle] = file = (self.process, next(self.files))
        self.note("create", path, file=file)
        return handle

    def write(self, handle: int, data) -> int:
        self._alive()
        taken = super().write(handle, data)
        self.note("write", file=self._file_of[handle], data=bytes(data[:taken]))
        return taken

    def sync(self, handle: int) -> None:
        self._alive()
        self.note("sync", file=self._file_of[handle])

    def link(self, old: Path, new: Path) -> None:
        self._alive()
        super().link(old, new)
        self.note("link", old, new)

    def unlink(self, path: Path) -> None:
        self._alive()
        super().unlink(path)
        self.note("unlink", path)

    def make_folder(self, path: Path) -> None:
        self._alive()
        super().make_folder(path)
        self.note("make folder", path)

    def sync_folder(self, path: Path) -> None:
        self._alive()
        self.note("sync folder", path)


@dataclass
class _File:
    data: bytes = b""
    safe: int = 0  # bytes that are sure to be there

    def leavings(self, choice: random.Random) -> list[bytes]:
        """What a power cut may make of it: all, the safe part, zeros instead of the rest, or some of its pages."""
        if self.safe == len(self.data):
            return [self.data]
        sure, rest = self.data[: self.safe], self.data[self.safe :]
        torn = b"".join(
            page if choice.random() < 0.5 else bytes(len(page))
            for page in (rest[at : at + PAGE] for at in range(0, len(rest), PAGE))
        )
        return [self.data, sure, sure + bytes(len(rest)), sure + torn, sure + rest[: choice.randrange(len(rest))]]


_FOLDER = (-1, -1)
_Target = tuple[int, int] | None


@dataclass
class PowerCut:
    """The state of the disk after some calls, as far as a power cut matters, of a store at `root`; `base` is a folder
    above that was there before. `there`: what names stand for safely; `open`: of each name that changed since its
    folder was synced, what it has stood for, one after the other."""

    base: str
    root: str
    files: dict[tuple[int, int], _File] = field(default_factory=dict)
    there: dict[str, _Target] = field(default_factory=dict)
    open: dict[str, list[_Target]] = field(default_factory=dict)

    def apply(self, call: Call) -> None:
        """The next call."""
        if call.kind == "create":
            self.files[call.file] = _File()
            self._name(call.path, call.file)
        elif call.kind == "write":
            self.files[call.file].data += call.data
        elif call.kind == "sync":
            self.files[call.file].safe = len(self.files[call.file].data)
        elif call.kind == "link":
            self._name(call.new, self._now(call.path))
        elif call.kind == "unlink":
            self._name(call.path, None)
        elif call.kind == "make folder":
            self._name(call.path, _FOLDER)
        elif call.kind == "sync folder":
            for path in [path for path in self.open if os.path.dirname(path) == call.path]:
                self.there[path] = self.open.pop(path)[-1]

    def _now(self, path: str) -> _Target:
        return self.open[path][-1] if path in self.open else self.there[path]

    def _name(self, path: str, target: _Target) -> None:
        self.open.setdefault(path, [self.there.get(path)]).append(target)

    def leavings(self, limit: int, choice: random.Random) -> Iterator[dict[str, bytes]]:
        """Objects by key that a power cut now may leave: all combinations, or `limit` of them by chance if there are
        more (among them: every name with none of the bytes that are not safe; and only what is safe)."""
        names = list(self.open)
        loose = [file for file, content in self.files.items() if content.safe < len(content.data)]
        ways = [self.open[name] for name in names]
        contents = [self.files[file].leavings(choice) for file in loose]
        count = 1
        for each in [*ways, *contents]:
            count *= len(each)
        if count <= limit:
            chosen = itertools.product(*ways, *contents)
        else:
            empty, nothing = [each[-1] for each in ways], [each[0] for each in ways]
            drawn = ([choice.choice(each) for each in [*ways, *contents]] for _ in range(limit - 2))
            sure = [each[1] for each in contents]
            chosen = itertools.chain([[*empty, *sure], [*nothing, *sure]], drawn)
        for picked in chosen:
            named = dict(zip(names, picked[: len(names)], strict=True))
            yield self._objects(named, dict(zip(loose, picked[len(names) :], strict=True)))

    def _objects(self, named: dict[str, _Target], content: dict[tuple[int, int], bytes]) -> dict[str, bytes]:
        names = {**self.there, **named}
        known = {path for path, target in names.items() if target == _FOLDER}
        found = {}
        for path, target in names.items():
            if target in (None, _FOLDER) or os.path.basename(path).startswith(".tmp-"):
                continue
            if known.issuperset(itertools.takewhile(lambda folder: folder != self.base, _folders(path))):
                found[path[len(self.root) + 1 :]] = content.get(target, self.files[target].data)
        return found


def _folders(path: str) -> Iterator[str]:
    while len(path) > 1:
        path = os.path.dirname(path)
        yield path


class Faulty(Disk):
    """Fails at calls by number (from 1): `faults` maps it to an error number, "short" (a write takes few bytes) or
    "stuck" (the call waits until `freed` is set). `steady`: from that number on every call fails."""

    def __init__(self, faults: dict[int, int | str] | None = None, steady: tuple[int, int] | None = None):
        self.faults, self.steady, self.count = faults or {}, steady, 0
        self.freed, self.stuck = threading.Event(), threading.Event()
        self.names: list[str] = []
        self._lock = threading.Lock()

    def _call(self, name: str) -> int | str | None:
        with self._lock:
            self.count += 1
            self.names.append(name)
            fault = self.faults.get(self.count)
        if self.steady and self.count >= self.steady[0]:
            fault = self.steady[1]
        if fault == "stuck":
            self.stuck.set()
            assert self.freed.wait(60)
        elif isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        return fault

    def create(self, path):
        self._call("create")
        return super().create(path)

    def write(self, handle, data):
        few = self._call("write") == "short"
        return super().write(handle, data[:7] if few else data)

    def sync(self, handle):
        self._call("sync")

    def close(self, handle):
        super().close(handle)
        self._call("close")

    def link(self, old, new):
        self._call("link")
        super().link(old, new)

    def unlink(self, path):
        self._call("unlink")
        super().unlink(path)

    def make_folder(self, path):
        self._call("make folder")
        super().make_folder(path)

    def sync_folder(self, path):
        self._call("sync folder")

    def open(self, path):
        self._call("open")
        return super().open(path)

    def read(self, handle, out, start):
        few = self._call("read") == "short"
        return super().read(handle, out[:7] if few else out, start)
