"""What a data source is: shards of documents, in an order that never changes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from truestep.errors import DataError


@dataclass(frozen=True)
class Document:
    """One document: its text, its token ids where the source is already tokenised, or a row with fields; the others are
    None. `origin` tells a person where it came from: file, and line or row."""

    text: str | None
    ids: np.ndarray | None
    origin: str
    row: dict[str, Any] | None = None


@runtime_checkable
class Source(Protocol):
    """The smallest source: the documents, in the same order every time. Enough for a source of your own."""

    def documents(self) -> Iterator[Document]: ...


class Shard(Protocol):
    """A part of a source that one process reads by itself. Shards are pickled on their way to that process.
    `name` is unique in the source; `size` is in bytes, for progress; `stamp` changes when the input changes."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def stamp(self) -> str: ...
    def documents(self) -> Iterator[Document]: ...


@runtime_checkable
class ShardedSource(Protocol):
    """A source that can be read in parallel. The order of documents is the order of the shards.
    `notes` goes into the header of the token store: licence, commit, whatever names the data."""

    @property
    def notes(self) -> dict[str, str]: ...
    def shards(self) -> list[Shard]: ...


@dataclass(frozen=True)
class WholeSource:
    """A plain source as a single shard."""

    source: Source
    name: str
    size: int = 0
    stamp: str = ""

    @property
    def notes(self) -> dict[str, str]:
        return {"source": self.name}

    def shards(self) -> list[Shard]:
        return [self]

    def documents(self) -> Iterator[Document]:
        for number, document in enumerate(self.source.documents()):
            if not isinstance(document, Document):
                raise DataError(
                    f"source {self.name!r} gave a {type(document).__name__} as document {number}; "
                    f"give a truestep.data.sources.base.Document."
                )
            yield document
