"""Paths of a recipe become files: single files, folders, globs and object-store URLs, in sorted order."""

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from truestep.errors import DataError
from truestep.storage.cache import expand, fetch
from truestep.storage.store import is_remote

SHARD_BYTES = 32 * 2**20


class File(Protocol):
    """One file to read. `url` names it to a person, `name` is its path below what was asked for; `size` in bytes is 0
    where it is unknown before the file is fetched; `stamp` changes when the file does."""

    @property
    def url(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def stamp(self) -> str: ...
    def here(self) -> AbstractContextManager[Path]: ...


@dataclass(frozen=True)
class InputFile:
    """A File on local disk or in an object store."""

    url: str
    name: str
    storage_options: dict[str, str] = field(default_factory=dict, hash=False)
    cache: Path = Path()

    @contextmanager
    def here(self) -> Iterator[Path]:
        """The file on this machine; a remote one is fetched through the verified cache first."""
        yield fetch(self.url, self.storage_options, self.cache) if is_remote(self.url) else Path(self.url)

    @property
    def size(self) -> int:
        return 0 if is_remote(self.url) else self._stat().st_size

    @property
    def stamp(self) -> str:
        if is_remote(self.url):
            return self.url
        stat = self._stat()
        return f"{stat.st_size}-{stat.st_mtime_ns}"

    def _stat(self) -> os.stat_result:
        with reading(self.url):
            return os.stat(self.url)


@dataclass(frozen=True)
class Inputs:
    """The `path` of a data section, with what is needed to reach it. A remote path that ends in / is a folder."""

    paths: tuple[str, ...]
    storage_options: dict[str, str] = field(default_factory=dict, hash=False)
    cache: Path = Path()

    def files(self, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> list[InputFile]:
        """All files, each once, sorted by URL. A file named by itself is always taken; in folders, globs and remote
        prefixes the patterns decide: `*` matches across folders, and they are held against the path below the folder.
        DataError for a path with no file behind it."""
        found: dict[str, InputFile] = {}
        for path in self.paths:
            named = path.removeprefix("file://")
            files = [f for f in self._behind(path) if f.url == named or _wanted(f.name, include, exclude)]
            if not files:
                what = f"include={list(include)}, exclude={list(exclude)}"
                raise DataError(f"{path} holds no input file for {what}; correct the path or the patterns.")
            found.update((f.url, f) for f in files)
        return [found[url] for url in sorted(found)]

    def _behind(self, path: str) -> Iterator[InputFile]:
        if is_remote(path):
            for url in expand(path + "*" if path.endswith("/") else path, self.storage_options):
                yield self._file(url, url.removeprefix(path) if path.endswith("/") else url.rsplit("/", 1)[-1])
            return
        local = path.removeprefix("file://")
        if os.path.isdir(local):
            yield from self._tree(local)
        elif glob.has_magic(local) and not os.path.exists(local):
            for match in sorted(glob.glob(local, recursive=True)):
                if os.path.isfile(match):
                    yield self._file(match, os.path.basename(match))
        elif os.path.exists(local):
            yield self._file(local, os.path.basename(local))
        else:
            raise DataError(f"{path} does not exist; correct `path` of the data section.")

    def _tree(self, root: str) -> Iterator[InputFile]:
        for folder, folders, names in os.walk(root, onerror=_unreadable):
            folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
            for name in sorted(names):
                if not name.startswith("."):
                    url = os.path.join(folder, name)
                    yield self._file(url, os.path.relpath(url, root))

    def _file(self, url: str, name: str) -> InputFile:
        return InputFile(url, name, self.storage_options, self.cache)


def _wanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    return any(fnmatchcase(name, p) for p in include) and not any(fnmatchcase(name, p) for p in exclude)


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}; give it read permission or exclude it.")


def grouped(files: Sequence[File], shard_bytes: int = SHARD_BYTES) -> Iterator[tuple[File, ...]]:
    """Neighbouring files in groups of about `shard_bytes`; a remote file (size unknown) is a group of its own."""
    group: list[File] = []
    size = 0
    for file in files:
        file_size = file.size or shard_bytes
        if group and size + file_size > shard_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(file)
        size += file_size
    if group:
        yield tuple(group)


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Operating-system errors while `url` is read become one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{url} cannot be read: {reason}; check that it exists and may be read.") from error


def decode(data: bytes, where: str) -> str:
    """UTF-8 text, exactly as it is (no newline or other normalisation). DataError names the line of a bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{where}, line {line}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8; "
            f"convert the file to UTF-8 or exclude it."
        ) from error
