"""Small files that are there whole or not at all, also after a power cut; the one JSON text of a value. Torch-free."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from truestep.errors import StorageError


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, UTF-8. NaN and infinities have none (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


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
