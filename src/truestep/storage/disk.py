"""The calls of the operating system that a local store makes, in one place: tests put recorders and faults there."""

import os
from pathlib import Path

from truestep.files import sync
from truestep.storage.interface import Data


class Disk:
    """Each method is one call. OSError where the system refuses."""

    def create(self, path: Path) -> int:
        """A handle of a new, empty file; FileExistsError if the name is taken."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: Data) -> int:
        """Append; how many bytes were taken, which may be fewer than given."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """Bring the file's bytes to the device."""
        os.fsync(handle)

    def open(self, path: Path) -> int:
        """A handle for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, handle: int, out: memoryview, start: int) -> int:
        """Fill `out` from byte `start` on; how many bytes came, 0 at the end of the file."""
        return os.preadv(handle, [out], start)

    def close(self, handle: int) -> None:
        os.close(handle)

    def link(self, old: Path, new: Path) -> None:
        """A second name of a file; FileExistsError if it is taken."""
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def sync_folder(self, path: Path) -> None:
        """Bring the names in a folder to the device."""
        sync(path)
