"""A store in a local folder. Every object is written aside, fsynced, linked under its name, and its folder fsynced.

`link` fails if the name is taken, so create-only needs no lock; nothing is ever renamed or overwritten.
"""

import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from truestep.errors import StorageError
from truestep.files import sync
from truestep.storage.interface import Data, Entry, Event, KeyExists, MissingKey, silent

TEMPORARY = ".tmp-"
STREAM_BYTES = 8 << 20

_REASONS = {
    errno.ENOSPC: "no space is left on the device; free some, or name another place",
    errno.EDQUOT: "the disk quota is used up; free some space, or name another place",
    errno.EFBIG: "the file would exceed the size limit of this file system or process; name another place",
    errno.EACCES: "no permission; give this user access to it, or name another place",
    errno.EPERM: "the operation is not permitted; give this user access to it, or name another place",
    errno.EROFS: "the file system is read-only; mount it writable, or name another place",
    errno.EEXIST: "a part of the path is a file, not a folder; name another place",
    errno.ENOTDIR: "a part of the path is a file, not a folder; name another place",
    errno.EIO: "the device reports an input/output error; check the disk",
}


def _said(error: OSError, doing: str, path: Path) -> StorageError:
    if error.errno == errno.ENOENT:
        return MissingKey(f"{path}: cannot {doing}: there is no such file")
    reason = _REASONS.get(error.errno or 0, f"{error.strerror or error}")
    return StorageError(f"{path}: cannot {doing}: {reason}")


def _make_folder(folder: Path) -> None:
    """Like mkdir -p, each new name made durable in its parent."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise KeyExists(f"{path}: exists already and was left as it is; committed objects are never replaced") from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        needs = "create-only objects need hard links, which this file system lacks; name another place"
        raise StorageError(f"{path}: cannot write it: {needs}") from None


class LocalStore:
    """Objects as files below `root`. `create` and `put` both refuse a name that is taken."""

    request_bytes = 2 << 20  # small enough to be hashed while it is still in the processor's cache
    requests_at_once = min(4, len(os.sched_getaffinity(0)))

    def __init__(self, root: str | Path, event: Event = silent):
        self.root = Path(root).expanduser().absolute()
        self.url = str(self.root)
        self.event = event

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise StorageError(f"{self.url}: '{key}' is not a key (an empty part, '.' or '..'); use a/b/c")
        return self.root.joinpath(*parts)

    def put(self, key: str, data: Data) -> None:
        self.put_parts(key, [data], len(data))

    def put_parts(self, key: str, parts: Iterable[Data], size: int) -> int:
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            _make_folder(path.parent)
            try:
                written = self._write(temporary, key, parts)
                _link(temporary, path)
                self.event(f"{key}: linked")
            finally:
                temporary.unlink(missing_ok=True)
            sync(path.parent)
        except OSError as error:
            raise _said(error, "write it", path) from None
        self.event(f"{key}: folder synced")
        return written

    def _write(self, temporary: Path, key: str, parts: Iterable[Data]) -> int:
        written = 0
        with open(temporary, "xb", buffering=1 << 20) as file:
            self.event(f"{key}: opened")
            for part in parts:
                file.write(part)
                written += len(part)
            file.flush()
            self.event(f"{key}: written")
            os.fsync(file.fileno())
        self.event(f"{key}: synced")
        return written

    def create(self, key: str, data: Data) -> None:
        self.put(key, data)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        try:
            return path.read_bytes()
        except OSError as error:
            raise _said(error, "read it", path) from None

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        out = bytearray(stop - start)
        self.read_into(key, start, memoryview(out))
        return bytes(out)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        path = self._path(key)
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                done = 0
                while done < len(out):
                    count = os.preadv(handle, [out[done:]], start + done)
                    if count == 0:
                        raise StorageError(
                            f"{path}: ends at byte {start + done}, but byte {start + len(out)} is needed"
                        )
                    done += count
            finally:
                os.close(handle)
        except OSError as error:
            raise _said(error, "read it", path) from None

    def stream(self, key: str) -> Iterator[Data]:
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                while piece := file.read(STREAM_BYTES):
                    yield piece
        except OSError as error:
            raise _said(error, "read it", path) from None

    def list(self, prefix: str = "") -> list[Entry]:
        folder = self._path(prefix.rstrip("/")) if prefix else self.root
        found = []
        try:
            for path, _, names in os.walk(folder, onerror=_unless_absent):
                for name in names:
                    if not name.startswith(TEMPORARY):
                        file = Path(path, name)
                        found.append(Entry(file.relative_to(self.root).as_posix(), file.stat().st_size))
        except OSError as error:
            raise _said(error, "list it", folder) from None
        return sorted(found, key=lambda entry: entry.key)

    def head(self, key: str) -> Entry:
        path = self._path(key)
        try:
            return Entry(key, path.stat().st_size)
        except OSError as error:
            raise _said(error, "look at it", path) from None

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink()
            sync(path.parent)
        except OSError as error:
            raise _said(error, "delete it", path) from None


def _unless_absent(error: OSError) -> None:
    """A folder that is not there holds no objects; anything else is an error."""
    if error.errno != errno.ENOENT:
        raise error
