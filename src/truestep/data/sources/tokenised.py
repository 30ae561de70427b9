"""Corpora that are already ids: Megatron-LM's .bin/.idx pairs and numpy's .npy (one or two dimensions of integers).

One local file is used where it lies, without a copy and without checksums; several files, remote ones, options that
choose among documents, or options.copy = true make a verified store of truestep's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from truestep.data.foreign import open_megatron, open_npy
from truestep.data.sources.base import Document, Shard
from truestep.data.sources.inputs import File, Inputs, reading
from truestep.data.store import TokenStore
from truestep.errors import DataError


@dataclass(frozen=True)
class TokenShard:
    """The files of one store: a .npy, or a .bin and its .idx."""

    files: tuple[File, ...]

    @property
    def name(self) -> str:
        return self.files[0].url

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def stamp(self) -> str:
        return " ".join(f.stamp for f in self.files)

    def documents(self) -> Iterator[Document]:
        with reading(self.name), ExitStack() as stack:
            store = open_tokens([stack.enter_context(file.here()) for file in self.files])
            for number in range(store.num_documents):
                yield Document(None, store.document(number), f"{self.name}, document {number}")


@dataclass(frozen=True)
class TokenSource:
    """options: include and exclude (patterns for folders and globs), copy (make a verified store of truestep's own)."""

    path: Inputs
    include: Sequence[str] | None = None
    exclude: Sequence[str] = ()
    copy: bool = False
    suffixes: ClassVar[tuple[str, ...]] = ()

    @property
    def notes(self) -> dict[str, str]:
        return {}

    def shards(self) -> list[Shard]:
        first, *others = self.suffixes
        patterns = [f"*{s}" for s in self.suffixes] if self.include is None else self.include
        files = {f.url: f for f in self.path.files(patterns, self.exclude)}
        shards: list[Shard] = []
        for url, file in files.items():
            if url.endswith(first):
                base = url.removesuffix(first)
                missing = [base + s for s in others if base + s not in files]
                if missing:
                    raise DataError(f"{url} lies without its {missing[0]}; name both files, or the folder of both.")
                shards.append(TokenShard((file, *(files[base + s] for s in others))))
        if not shards:
            raise DataError(f"{next(iter(files))} is not a {first} file; correct `path` of the data section.")
        return shards

    def in_place(self, vocab_size: int, eod_id: int) -> TokenStore | None:
        """The one local store behind the path; None where a copy has to be made."""
        shards = self.shards()
        if self.copy or len(shards) > 1:
            return None
        files = [Path(file.url) for file in shards[0].files] if isinstance(shards[0], TokenShard) else []
        return open_tokens(files, vocab_size, eod_id) if all(f.is_file() for f in files) else None


class MegatronSource(TokenSource):
    """Megatron-LM's indexed datasets; `path` names the folder, a glob of .bin and .idx files, or both files."""

    suffixes = (".bin", ".idx")


class NpySource(TokenSource):
    """numpy arrays; pickled objects in them are refused."""

    suffixes = (".npy",)


def open_tokens(files: Sequence[Path], vocab_size: int | None = None, eod_id: int | None = None) -> TokenStore:
    """A .npy, or a .bin with its .idx, which may lie in two folders of a cache."""
    if files[0].suffix == ".npy":
        return open_npy(files[0], vocab_size=vocab_size, eod_id=eod_id)
    return open_megatron(files[0].with_suffix(""), vocab_size=vocab_size, eod_id=eod_id)
