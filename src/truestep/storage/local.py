"""A store in a local folder. Every object is written aside, fsynced, linked under its name, and its folder fsynced.

`link` fails if the name is taken, so create-only needs no lock; nothing is ever renamed or overwritten.
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from truestep.errors import StorageError
from truestep.storage.disk import Disk
from truestep.storage.interface import Data, Entry, Event, KeyExists, MissingKey, Store, Undurable, silent

TEMPORARY = ".tmp-"
WRITE_BYTES = 1 << 20  # smaller parts are gathered, so that a thousand small tensors are not a thousand calls

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


class LocalStore(Store):
    """Objects as files below `root`. `create` and `put` both refuse a name that is taken."""

    request_bytes = 2 << 20  # small enough to be hashed while it is still in the processor's cache
    requests_at_once = min(4, len(os.sched_getaffinity(0)))

    def __init__(self, root: str | Path, event: Event = silent, disk: Disk | None = None):
        self.root = Path(root).expanduser().absolute()
        self.url = str(self.root)
        self.event = event
        self.disk = disk or Disk()
        self._durable: set[Path] = set()

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise StorageError(f"{self.url}: '{key}' is not a key (an empty part, '.' or '..'); use a/b/c")
        return self.root.joinpath(*parts)

    def put_parts(self, key: str, parts: Iterable[Data], size: int) -> int:
        path = self._path(key)
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            self._make_durable(path.parent)
            written = self._write(temporary, key, parts)
            try:
                self._link(temporary, path)
                self.event(f"{key}: linked")
            except BaseException:
                self._remove(temporary)
                raise
        except OSError as error:
            raise _said(error, "write it", path) from None
        try:
            self.disk.unlink(temporary)
            self.disk.sync_folder(path.parent)
        except OSError as error:
            raise Undurable(f"{_said(error, 'write it', path)} (a power cut may still take it away)") from None
        self.event(f"{key}: folder synced")
        return written

    def _make_durable(self, folder: Path) -> None:
        """Like mkdir -p. Each name on the way is brought to the device, once in a store's life: also one that is there
        already, since whoever made it may have been killed before it was synced."""
        there, parent = folder.is_dir(), folder.parent
        if os.path.ismount(folder) or (there and folder in self._durable):
            return
        if there and not os.access(parent, os.R_OK | os.W_OK):
            return  # nobody with our rights can have made it
        self._make_durable(parent)
        try:
            if not there:
                self.disk.make_folder(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise
        self.disk.sync_folder(parent)
        self._durable.add(folder)

    def _write(self, temporary: Path, key: str, parts: Iterable[Data]) -> int:
        """Write and sync a new file; nothing is left of it if that fails."""
        handle = self.disk.create(temporary)
        try:
            try:
                self.event(f"{key}: opened")
                written = self._append(handle, key, parts)
                self.event(f"{key}: written")
                self.disk.sync(handle)
            finally:
                self.disk.close(handle)
            self.event(f"{key}: synced")
        except BaseException:
            self._remove(temporary)
            raise
        return written

    def _append(self, handle: int, key: str, parts: Iterable[Data]) -> int:
        written, gathered = 0, bytearray()
        for number, part in enumerate(parts, 1):
            written += len(part)
            if len(gathered) + len(part) > WRITE_BYTES:
                self._write_all(handle, gathered)
                gathered = bytearray()
            if len(part) > WRITE_BYTES:
                self._write_all(handle, part)
            else:
                gathered += part
            self.event(f"{key}: part {number}")
        self._write_all(handle, gathered)
        return written

    def _write_all(self, handle: int, data: Data) -> None:
        left = memoryview(data)
        while len(left):
            taken = self.disk.write(handle, left)
            if not taken:
                raise OSError(errno.EIO, "the device takes no bytes")
            left = left[taken:]

    def _link(self, temporary: Path, path: Path) -> None:
        try:
            self.disk.link(temporary, path)
        except FileExistsError:
            raise KeyExists(
                f"{path}: exists already and was left as it is; committed objects are never replaced"
            ) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            needs = "create-only objects need hard links, which this file system lacks; name another place"
            raise StorageError(f"{path}: cannot write it: {needs}") from None

    def _remove(self, temporary: Path) -> None:
        """Take away what a failure leaves. If that fails too, the first failure is the one to tell of: no reader looks
        at such a file, and the sweeper takes it."""
        with contextlib.suppress(OSError):
            self.disk.unlink(temporary)

    def create(self, key: str, data: Data) -> None:
        self.put(key, data)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        path = self._path(key)
        try:
            handle = self.disk.open(path)
            try:
                done = 0
                while done < len(out):
                    count = self.disk.read(handle, out[done:], start + done)
                    if count == 0:
                        raise StorageError(
                            f"{path}: ends at byte {start + done}, but byte {start + len(out)} is needed"
                        )
                    done += count
            finally:
                self.disk.close(handle)
        except OSError as error:
            raise _said(error, "read it", path) from None

    def list(self, prefix: str = "") -> list[Entry]:
        folder = self._path(prefix.rstrip("/")) if prefix else self.root
        found = []
        try:
            for path, _, names in os.walk(folder, onerror=_unless_absent):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
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
            self.disk.unlink(path)
            self.event(f"{key}: unlinked")
            self.disk.sync_folder(path.parent)
        except OSError as error:
            raise _said(error, "delete it", path) from None
        self.event(f"{key}: deleted")


def _unless_absent(error: OSError) -> None:
    """A folder that is not there holds no objects; anything else is an error."""
    if error.errno != errno.ENOENT:
        raise error
