"""Small files that are there whole or not at all, also after a power cut. Torch-free."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from truestep.errors import StorageError


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(path: Path, data: bytes) -> None:
    """Write a file, or replace it: a reader sees all of the old or all of the new, and what is left is never a part."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


@contextlib.contextmanager
def writing(path: Path, remedy: str = "free space or choose a folder you may write to") -> Iterator[None]:
    """Turns what the operating system refuses (no space, no permission, ...) into one sentence about `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot write ({error.strerror or error}); {remedy}") from error
