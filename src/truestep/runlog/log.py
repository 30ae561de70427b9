"""The run log: append-only typed records in hash-chained segments, `log/events-<attempt>-<n>.jsonl`.

A line is `{"chain":"<sha256>",<body>` where chain = sha256(chain of the line before + the body's bytes), so that a line
cannot be changed, added or removed without breaking the next one. The first line of a segment names the chain head it
continues from (`previous`): what a killed attempt had half written, and what a paused one writes after a newer attempt
has begun, lies behind that point, does not count, and is said.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.errors import LogError, StorageError
from truestep.files import sync
from truestep.runlog.records import KINDS, Record, spell, typed

GENESIS = "0" * 64
SEGMENT_BYTES = 64 * 2**20
_PREFIX = b'{"chain":"'
_BODY_AT = len(_PREFIX) + 64 + 2  # behind the hash and `",`
_NAME = re.compile(r"events-(\d{4,})-(\d+)\.jsonl")


def _link(previous: str, body: bytes) -> str:
    return hashlib.sha256(previous.encode() + body).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def segments(run_dir: Path | str) -> list[Path]:
    """The segments of a run that have a whole first line, in order. Says so if `run_dir` is no run directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise LogError(f"{run_dir} is not a run directory: it does not exist; give the folder <run.dir>/<run.name>")
    if not (run_dir / "log").is_dir():
        raise LogError(f"{run_dir} is not a run directory: it has no folder log; give the folder <run.dir>/<run.name>")
    found = [(int(m[1]), int(m[2]), path) for path in (run_dir / "log").iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, _, path in sorted(found) if _first_line(path)]


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        line = file.readline()
    return line if line.endswith(b"\n") else b""


def _previous(path: Path) -> str:
    """The chain head that a segment says it continues from."""
    try:
        first = json.loads(_first_line(path))
        return str(first["data"]["previous"])
    except (ValueError, KeyError, TypeError):
        raise LogError(f"{path} line 1 is not the start of a log segment; restore the file from a copy") from None


class LogReader:
    """Reads and verifies a log as it grows: each call of `records()` yields what is new.

    `head` and `count` are of the last record yielded; `remarks` says what was left out and why.
    """

    def __init__(self, run_dir: Path | str, start: Path | None = None):
        """`start` begins at that segment, trusting the head that it continues from."""
        self.run_dir = Path(run_dir)
        self.head, self.count, self.remarks = _previous(start) if start else GENESIS, 0, list[str]()
        self._file = start
        self._offset, self._line = 0, 0

    def records(self) -> Iterator[Record]:
        """Yield the records not yet seen; raise LogError naming file and line at the first break of the chain."""
        while True:
            paths = segments(self.run_dir)
            at = paths.index(self._file) if self._file else -1
            following = paths[at + 1] if at + 1 < len(paths) else None
            stop = _previous(following) if following else None
            if self._file:
                yield from self._read(self._file, stop)
            if following is None:
                return
            if self.head != stop:
                where = f"follows the end of {self._file.name}" if self._file else "is the beginning of a log"
                raise LogError(
                    f"{following} line 1: the hash chain breaks here, since nothing that {where} has the hash "
                    f"{str(stop)[:12]}; restore the missing or changed segment from a copy"
                )
            self._file, self._offset, self._line = following, 0, 0

    def _read(self, path: Path, stop: str | None) -> Iterator[Record]:
        with path.open("rb") as file:
            file.seek(self._offset)
            while self.head != stop:
                line = file.readline()
                if not line.endswith(b"\n"):
                    break
                record = self._verified(path, line)
                self._offset += len(line)
                yield record
        rest = path.stat().st_size - self._offset
        if stop is not None and rest:
            late = "the torn end of an attempt that was killed, or written after a newer attempt had begun"
            self.remarks.append(f"{path.name} from line {self._line + 1} on ({rest} bytes) does not count: {late}")

    def torn(self) -> str | None:
        """What lies unfinished at the end of the last segment: a record being written, or torn by a kill."""
        if self._file is None or not (rest := self._file.stat().st_size - self._offset):
            return None
        line = f"{self._file.name} line {self._line + 1}"
        return f"{line} is incomplete ({rest} bytes; torn if the attempt was killed) and does not count"

    def _verified(self, path: Path, line: bytes) -> Record:
        self._line += 1
        chain, body = line[len(_PREFIX) : len(_PREFIX) + 64].decode("ascii", "replace"), b"{" + line[_BODY_AT:-1]
        if not line.startswith(_PREFIX) or _link(self.head, body) != chain:
            raise LogError(
                f"{path} line {self._line}: the hash chain breaks here (this record, or one before it, was changed, "
                "added or removed after it was written); restore the log from a copy, its figures prove nothing"
            )
        values = json.loads(body)
        self.head, self.count = chain, self.count + 1
        kind = values["kind"]
        return Record(values["seq"], values["time"], values["attempt"], kind, typed(kind, values["data"]), chain)


def read(run_dir: Path | str) -> Iterator[Record]:
    """Every record of a run in order, verified on the way. LogError: no run directory, an empty or an altered log."""
    reader = LogReader(run_dir)
    yield from reader.records()
    if not reader.count:
        raise LogError(f"{Path(run_dir) / 'log'} has no records: the run has not begun; start it with `truestep run`")


@dataclass(frozen=True)
class Verified:
    """A log whose chain holds from the first record to `head`."""

    records: int
    head: str
    remarks: list[str]


def verify(run_dir: Path | str, heads: Iterable[str] = ()) -> Verified:
    """Check the whole chain, and that each of `heads` (kept elsewhere, in commits for instance) is one of its links.

    Only heads from outside can show that the end of a log was cut off or that all of it was written anew.
    """
    reader, wanted = LogReader(run_dir), set(heads)
    for record in reader.records():
        wanted.discard(record.chain)
    if not reader.count:
        raise LogError(f"{Path(run_dir) / 'log'} has no records: the run has not begun; start it with `truestep run`")
    if wanted:
        raise LogError(
            f"{Path(run_dir) / 'log'} does not contain the chain head {min(wanted)[:12]} that a commit names: its end "
            "was cut off or it was written anew; restore the log from a copy"
        )
    torn = reader.torn()
    return Verified(reader.count, reader.head, reader.remarks + ([torn] if torn else []))


def next_attempt(run_dir: Path | str) -> int:
    """The number of the attempt to start: 1 for a new run. Call it in one process and tell the others."""
    folder = Path(run_dir) / "log"
    numbers = [int(m[1]) for path in folder.glob("events-*") if (m := _NAME.fullmatch(path.name))]
    return max(numbers, default=0) + 1


class RunLog:
    """The one writer of a run's log, in one process. A killed process loses at most the record it was writing.

    The segment is locked while it is open, so that readers on this host can tell a running attempt from a dead one.
    """

    def __init__(self, run_dir: Path | str, attempt: int, segment_bytes: int = SEGMENT_BYTES):
        self.run_dir, self.attempt, self._segment_bytes = Path(run_dir), attempt, segment_bytes
        (self.run_dir / "log").mkdir(parents=True, exist_ok=True)
        self._head, self._seq, self._file, self._size, self._part = *self._continue(), -1, 0, -1
        self._next_segment()

    def _continue(self) -> tuple[str, int]:
        """Head and next sequence number of the log so far: its last segment is read and verified."""
        paths = segments(self.run_dir)
        if not paths:
            return GENESIS, 0
        last = paths[-1]
        if is_locked(last):
            raise LogError(f"{self.run_dir} is in use: another process writes {last.name}; stop that run first")
        reader, seq = LogReader(self.run_dir, start=last), -1
        for record in reader.records():
            seq = record.seq
        return reader.head, seq + 1

    def _next_segment(self) -> None:
        self._part += 1
        path = self.run_dir / "log" / f"events-{self.attempt:04d}-{self._part}.jsonl"
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            taken = f"{path} exists: attempt {self.attempt} was already begun by another process"
            raise LogError(f"{taken}; stop that one, then run again") from None
        except OSError as error:
            raise StorageError(f"cannot create {path}: {error.strerror}; free space or permit writing there") from None
        _lock(file, fcntl.LOCK_EX)
        old, self._file, self._size = self._file, file, 0
        self.append("segment", previous=self._head, host=socket.gethostname(), pid=os.getpid())
        sync(path.parent)
        if old >= 0:
            os.fsync(old)
            os.close(old)

    def append(self, kind: str, /, **values: Any) -> None:
        """Write one record of `kind` (a key of KINDS), at once. TypeError on missing, unknown or non-JSON fields."""
        values = {name: value for name, value in values.items() if value is not None}
        KINDS[kind](**values)  # the dataclass checks the names, and that nothing needed is None
        envelope = {"seq": self._seq, "time": round(time.time(), 3), "attempt": self.attempt, "kind": kind}
        body = _json(envelope | {"data": spell(values)})
        chain = _link(self._head, body)
        line = _PREFIX + chain.encode() + b'",' + body[1:] + b"\n"
        self._write(line)
        self._head, self._seq = chain, self._seq + 1
        if self._size >= self._segment_bytes:
            self._next_segment()

    def _write(self, line: bytes) -> None:
        """All of the line or nothing: a record cut short by a full disk is taken back."""
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])  # says why
        except OSError as error:
            os.ftruncate(self._file, self._size)
            folder = self.run_dir / "log"
            raise StorageError(
                f"cannot write to {folder}: {error.strerror}; free space there, then run again"
            ) from None
        self._size += len(line)

    def require_newest(self) -> None:
        """LogError once a newer attempt has begun: what this one writes from then on does not count."""
        newest = next_attempt(self.run_dir) - 1
        if newest > self.attempt:
            taken = f"attempt {newest} of {self.run_dir} has begun"
            raise LogError(f"{taken}, so attempt {self.attempt} must stop; nothing is lost, look at the newer one")

    def head(self) -> str:
        """The chain head of the last record, which is on disk when this returns: what a commit may name."""
        os.fsync(self._file)
        return self._head

    def close(self) -> None:
        """Make everything durable and let go of the segment."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1


def _lock(file: int, mode: int) -> bool | None:
    """Take a lock without waiting: True if it was free, None where the file system has no locks."""
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return None
    return True


def is_locked(segment: Path) -> bool | None:
    """Whether a process on this host has the segment open for writing; None where it cannot be told."""
    with segment.open("rb") as file:
        free = _lock(file.fileno(), fcntl.LOCK_SH)
    return None if free is None else not free
