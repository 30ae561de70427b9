"""The source text of the running Python's standard library: a real corpus that every machine has."""

import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from truestep.data.sources.base import Document, Shard
from truestep.data.sources.inputs import File, InputFile, grouped, reading
from truestep.errors import DataError

_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_GROUP_BYTES = 2**20


@dataclass(frozen=True)
class PythonShard:
    """Neighbouring modules. Names are relative to the library, so that they are the same on every machine."""

    files: tuple[File, ...]

    @property
    def name(self) -> str:
        return self.files[0].name

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def stamp(self) -> str:
        return " ".join(f"{f.name} {f.size}" for f in self.files)

    def documents(self) -> Iterator[Document]:
        for file in self.files:
            with reading(file.url), file.here() as path:
                yield Document(_source_text(path), None, file.name)


@dataclass(frozen=True)
class PythonStdlibSource:
    """No options. Tests, installed packages and the generated build settings (which name local paths) are left out."""

    @property
    def notes(self) -> dict[str, str]:
        return {
            "what": f"standard library of {platform.python_implementation()} {platform.python_version()}",
            "licence": "PSF-2.0",
        }

    def shards(self) -> list[Shard]:
        root = sysconfig.get_path("stdlib")
        files = sorted(_modules(root), key=lambda f: f.name)
        if not files:
            raise DataError(f"{root} holds no .py files of the standard library; install Python with its sources.")
        return [PythonShard(group) for group in grouped(files, _GROUP_BYTES)]


def _modules(root: str) -> Iterator[InputFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = os.path.join(folder, name)
                if os.path.getsize(path):
                    yield InputFile(path, Path(path).relative_to(root).as_posix())


def _source_text(path: Path) -> str:
    """Decoded by the encoding that the module declares; newlines stay as they are."""
    with open(path, "rb") as file:
        encoding, _ = tokenize.detect_encoding(file.readline)
        file.seek(0)
        return file.read().decode(encoding)
