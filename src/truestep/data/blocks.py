"""Folders of raw little-endian files with an xxh3-64 for every block: written once, verified when read.

`checksums.bin` holds the sums of all blocks of all files, in the order of their names, as uint64; `header.json` holds
the sizes, the digest of `checksums.bin` and its own digest. The header is written last: its presence is the commit.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from truestep.errors import DataError
from truestep.files import canonical, publish, writing

CHECKSUMS, HEADER = "checksums.bin", "header.json"
REMEDY = "remove its folder and build the data again"


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 of a buffer, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[i], starts[i] + 1, ... (lengths[i] of them) for every i, one after the other, int64."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)


def taken(reader: "BlockReader", dtype: str, indices: np.ndarray) -> np.ndarray:
    """The values at `indices` of a file of `dtype`, verified."""
    width = np.dtype(dtype).itemsize
    reader.touch(indices * width, (indices + 1) * width)
    return reader.data.view(dtype)[indices]


def ranges(reader: "BlockReader", dtype: str, starts: np.ndarray, lengths: np.ndarray, each: int = 1) -> np.ndarray:
    """Items [starts[i], starts[i] + lengths[i]) of every i (lengths > 0), concatenated and verified; an item is `each`
    values of `dtype`."""
    width = np.dtype(dtype).itemsize * each
    reader.touch(starts * width, (starts + lengths) * width)
    data, stops = reader.data.view(dtype), (starts + lengths) * each
    return np.concatenate([data[:0], *(data[a:b] for a, b in zip((starts * each).tolist(), stops.tolist()))])


class BlockWriter:
    """A growing file whose blocks are hashed as they are written."""

    def __init__(self, path: Path, block_bytes: int):
        self.path, self.block_bytes = path, block_bytes
        self.sums: list[int] = []
        self.num_bytes = 0
        self._hash = xxhash.xxh3_64()
        self._file: BinaryIO = path.open("wb")

    def write(self, data: np.ndarray) -> None:
        rest = np.ascontiguousarray(data).data.cast("B")
        while len(rest):
            room = self.block_bytes - self.num_bytes % self.block_bytes
            part, rest = rest[:room], rest[room:]
            self._file.write(part)
            self._hash.update(part)
            self.num_bytes += len(part)
            if self.num_bytes % self.block_bytes == 0:
                self._end_block()

    def _end_block(self) -> None:
        self.sums.append(self._hash.intdigest())
        self._hash.reset()

    def finish(self) -> None:
        """Hash the last, shorter block and bring everything to the disk."""
        if self.num_bytes % self.block_bytes:
            self._end_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # a full disk refuses the last bytes of a file that goes away anyhow
            self._file.close()
        self.path.unlink(missing_ok=True)


class BlockReader:
    """A memory-mapped file; `touch` verifies the blocks of byte ranges the first time that this process reads them."""

    def __init__(self, path: Path, num_bytes: int, block_bytes: int, sums: np.ndarray):
        self.path, self.block_bytes, self.sums = path, block_bytes, sums
        self.data = map_file(path, num_bytes)  # uint8
        self._seen = np.zeros(len(sums), dtype=bool)
        self._num_unseen = len(sums)

    def touch(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Raises DataError naming the file and the block where [starts, stops) holds a changed byte."""
        if self._num_unseen == 0:
            return
        first, last = starts // self.block_bytes, (stops - 1) // self.block_bytes
        blocks = np.unique(ragged(first, last - first + 1))
        for block in blocks[~self._seen[blocks]].tolist():
            self._check(block)
            self._seen[block] = True
        self._num_unseen = len(self.sums) - int(np.count_nonzero(self._seen))

    def verify(self) -> None:
        """Hash every block, seen or not."""
        for block in range(len(self.sums)):
            self._check(block)

    def _check(self, block: int) -> None:
        start = block * self.block_bytes
        if xxhash.xxh3_64_intdigest(self.data[start : start + self.block_bytes].data) != int(self.sums[block]):
            raise DataError(
                f"{self.path}: block {block} (bytes {start} to {min(start + self.block_bytes, len(self.data))}) does "
                f"not match its checksum, so the file was changed or damaged; {REMEDY}"
            )


class FolderWriter:
    """The files of a folder while they are written. As a context manager, leaving it without `commit` removes them."""

    def __init__(self, path: Path, kind: str, contents: str, names: Sequence[str], block_bytes: int = 1 << 20):
        """`contents`: what it holds. Raises DataError if the folder is finished already, StorageError where it
        cannot be written."""
        if block_bytes <= 0 or block_bytes % 8:
            raise ValueError(f"block_bytes {block_bytes} is not a positive multiple of 8")
        if (path / HEADER).exists():
            raise DataError(f"{path}: already holds {contents}; remove it or choose another folder")
        self.path, self.kind = path, kind
        with writing(path):
            self._made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            self._writers = {name: BlockWriter(path / name, block_bytes) for name in names}

    def write(self, name: str, data: np.ndarray) -> None:
        """Add to the file of this name."""
        self._writers[name].write(data)

    def commit(self, header: dict[str, Any]) -> None:
        """Bring all to the disk and publish the header."""
        commit_folder(self.path, self.kind, list(self._writers.values()), header)

    def abort(self) -> None:
        """Remove what was written so far."""
        for writer in self._writers.values():
            writer.abort()
        (self.path / CHECKSUMS).unlink(missing_ok=True)
        if self._made and not any(self.path.iterdir()):
            self.path.rmdir()

    def __enter__(self) -> "FolderWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if not (self.path / HEADER).exists():
            self.abort()


def commit_folder(folder: Path, kind: str, writers: Sequence[BlockWriter], header: dict[str, Any]) -> None:
    """Finish the writers' files (all in `folder`, of one block size) and publish the header with `header`'s fields."""
    for writer in writers:
        writer.finish()
    writers = sorted(writers, key=lambda writer: writer.path.name)
    sums = np.array([s for writer in writers for s in writer.sums], dtype="<u8")
    publish(folder / CHECKSUMS, sums.tobytes())
    header = {
        "format": kind,
        "block_bytes": writers[0].block_bytes,
        "files": {writer.path.name: writer.num_bytes for writer in writers},
        "checksums": digest(sums.data),
        **header,
    }
    header["digest"] = digest(canonical(header))
    publish(folder / HEADER, json.dumps(header, indent=1, sort_keys=True, ensure_ascii=False).encode())


def open_folder(folder: Path, kind: str) -> tuple[dict[str, Any], dict[str, BlockReader]]:
    """The header (without its digest) and a reader for each file. Reads the header and the checksums, no data."""
    header = _read_header(folder, kind)
    block_bytes, files = header["block_bytes"], sorted(header["files"].items())
    num_blocks = [-(-num_bytes // block_bytes) for _, num_bytes in files]
    sums = map_file(folder / CHECKSUMS, sum(num_blocks) * 8)
    if digest(sums.data) != header["checksums"]:
        raise DataError(f"{folder / CHECKSUMS}: does not match the digest in {HEADER}; {REMEDY}")
    parts = np.split(sums.view("<u8"), np.cumsum(num_blocks)[:-1])
    readers = {name: BlockReader(folder / name, size, block_bytes, part) for (name, size), part in zip(files, parts)}
    return header, readers


def read_format(folder: Path) -> str | None:
    """What kind of folder this is, as its header says; None if there is no header to be read."""
    try:
        header = json.loads((folder / HEADER).read_bytes())
    except (OSError, ValueError):
        return None
    return header.get("format") if isinstance(header, dict) else None


def _read_header(folder: Path, kind: str) -> dict[str, Any]:
    file = folder / HEADER
    try:
        header = json.loads(file.read_bytes())
    except OSError as error:
        what = f"has no readable {HEADER}, so was not finished" if folder.is_dir() else "does not exist"
        raise DataError(f"{folder}: {what} ({error.strerror}); build the data first") from None
    except ValueError:
        raise DataError(f"{file}: is not JSON; {REMEDY}") from None
    if not isinstance(header, dict) or header.get("format") != kind:
        raise DataError(f"{file}: is not the header of a {kind} folder; {REMEDY}")
    if header.pop("digest", None) != digest(canonical(header)):
        raise DataError(f"{file}: was changed or damaged (its digest does not match); {REMEDY}")
    return header


def map_file(path: Path, num_bytes: int | None = None) -> np.ndarray:
    """The file's bytes as a read-only uint8 array without reading them; DataError if absent or not `num_bytes` long."""
    try:
        actual = path.stat().st_size
        if num_bytes is not None and actual != num_bytes:
            raise DataError(f"{path}: has {actual} bytes where its header says {num_bytes}; {REMEDY}")
        if actual == 0:
            return np.empty(0, dtype=np.uint8)
        # A plain view: slicing numpy's memmap class costs a microsecond a time.
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path, or {REMEDY}") from None
