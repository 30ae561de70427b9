"""JSON Lines, plain or compressed with gzip or zstd: one object a line, the text in one of its fields, or the whole
object as a row."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from truestep.data.sources.base import Document, Shard
from truestep.data.sources.compressed import is_compressed, open_binary
from truestep.data.sources.inputs import SHARD_BYTES, File, Inputs, decode, reading
from truestep.errors import DataError
from truestep.storage.store import is_remote

PATTERNS = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.ndjson", "*.ndjson.gz", "*.ndjson.zst")


@dataclass(frozen=True)
class JsonlShard:
    """The lines that begin in bytes [start, stop) of a file; stop None is the end. Only plain files are cut.
    Without a text field, documents are rows."""

    file: File
    text_field: str | None
    start: int = 0
    stop: int | None = None

    @property
    def name(self) -> str:
        return self.file.url if self.start == 0 else f"{self.file.url}@{self.start}"

    @property
    def size(self) -> int:
        return self.file.size if self.stop is None else self.stop - self.start

    @property
    def stamp(self) -> str:
        return self.file.stamp

    def documents(self) -> Iterator[Document]:
        with reading(self.file.url), self.file.here() as path, open_binary(path, self.file.url) as lines:
            yield from self._documents(path, lines)

    def _documents(self, path: Path, lines: BinaryIO) -> Iterator[Document]:
        position = self.start
        if self.start:
            lines.seek(self.start - 1)
            position += len(lines.readline()) - 1  # the rest of a line that began in the shard before
        number = 0
        while self.stop is None or position < self.stop:
            line = lines.readline()
            if not line:
                return
            number += 1
            if line.strip():
                yield self._document(path, line, position, number)
            position += len(line)

    def _document(self, path: Path, line: bytes, position: int, number: int) -> Document:
        try:
            row = row_of_line(line, self.text_field)
            text = None if self.text_field is None else text_of_row(row, self.text_field)
        except ValueError as error:
            if self.start:  # lines before this shard are counted only when somebody needs to know
                with open(path, "rb") as file:
                    number = sum(block.count(b"\n") for block in _blocks(file, position)) + 1
            raise DataError(f"{self.file.url}, line {number}: {error}.") from error
        where = f"line {number}" if self.start == 0 else f"byte {position}"
        origin = f"{self.file.url}, {where}"
        return Document(None, None, origin, row) if text is None else Document(text, None, origin)


def row_of_line(line: bytes, text_field: str | None) -> dict[str, Any]:
    """The object in one line of JSON. ValueError says what is wrong with it, and the remedy."""
    try:
        row: Any = json.loads(decode(line, "the line"))
    except DataError:
        raise ValueError("the line is not UTF-8; convert the file") from None
    except json.JSONDecodeError as error:
        shown = line.strip()[:40].decode("utf-8", "replace")
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}): {shown!r}; repair or remove it") from None
    if not isinstance(row, dict):
        wanted = "an object" if text_field is None else f"an object with a field {text_field!r}"
        raise ValueError(f"a {type(row).__name__}, not {wanted}; repair the line")
    return row


def text_of_row(row: dict[str, Any], text_field: str) -> str:
    """The text in an object. ValueError as above."""
    if text_field not in row:
        known = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"no field {text_field!r} (fields: {known}); set `text_field`")
    if not isinstance(row[text_field], str):
        raise ValueError(f"field {text_field!r} holds {json.dumps(row[text_field])[:40]}, not text; repair the row")
    return row[text_field]


@dataclass(frozen=True)
class JsonlSource:
    """options: include and exclude (patterns for folders and globs)."""

    path: Inputs
    text_field: str | None
    include: tuple[str, ...] = PATTERNS
    exclude: tuple[str, ...] = ()

    @property
    def notes(self) -> dict[str, str]:
        return {}

    def shards(self) -> list[Shard]:
        files = self.path.files(self.include, self.exclude)
        return [shard for file in files for shard in file_shards(file, self.text_field)]


def file_shards(file: File, text_field: str | None, shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """A plain local file is cut into byte ranges; a compressed or remote one is a single shard."""
    if is_remote(file.url) or is_compressed(file.url) or file.size <= shard_bytes:
        return [JsonlShard(file, text_field)]
    starts = range(0, file.size, shard_bytes)
    return [JsonlShard(file, text_field, start, min(start + shard_bytes, file.size)) for start in starts]


def _blocks(file: BinaryIO, count: int) -> Iterator[bytes]:
    while count and (block := file.read(min(count, 2**20))):
        count -= len(block)
        yield block
