"""Plain text: every file is a document, exactly as it is on disk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from truestep.data.sources.base import Document, Shard
from truestep.data.sources.inputs import File, Inputs, decode, grouped, reading


@dataclass(frozen=True)
class TextShard:
    """Neighbouring files, so that a tree of many small ones makes few shards."""

    files: tuple[File, ...]

    @property
    def name(self) -> str:
        return self.files[0].url

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def stamp(self) -> str:
        return " ".join(f"{f.url} {f.stamp}" for f in self.files)

    def documents(self) -> Iterator[Document]:
        for file in self.files:
            with reading(file.url), file.here() as path:
                data = path.read_bytes()
            yield Document(decode(data, file.url), None, file.url)


@dataclass(frozen=True)
class TextSource:
    """options: include and exclude (patterns for folders and globs; `*` matches across folders)."""

    path: Inputs
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()

    @property
    def notes(self) -> dict[str, str]:
        return {}

    def shards(self) -> list[Shard]:
        return [TextShard(group) for group in grouped(self.path.files(self.include, self.exclude))]
