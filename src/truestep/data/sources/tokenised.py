"""Corpora that are already ids: Megatron-LM's .bin/.idx pairs, and numpy's .npy (one or two dimensions of integers).

The build copies them into a store with checksums. To read such files where they lie, see truestep.data.foreign.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from truestep.data.foreign import open_megatron, open_npy
from truestep.data.sources.base import Document, Shard
from truestep.data.sources.inputs import File, Inputs, reading
from truestep.data.store import TokenStore
from truestep.errors import DataError

_READ_TOKENS = 2**22


@dataclass(frozen=True)
class TokenShard:
    """The files of one corpus: a .npy, or a .bin and its .idx."""

    files: tuple[File, ...]
    eod_id: int | None = None

    @property
    def name(self) -> str:
        return self.files[0].url

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def stamp(self) -> str:
        return " ".join([*(f.stamp for f in self.files), str(self.eod_id)])

    def documents(self) -> Iterator[Document]:
        with reading(self.name), ExitStack() as stack:
            store = _opened([stack.enter_context(file.here()) for file in self.files], stack)
            documents = range(store.num_documents)
            parts = map(store.document, documents) if self.eod_id is None else _cut(store, self.eod_id)
            for number, ids in enumerate(parts):
                yield Document(None, ids, f"{self.name}, document {number}")


@dataclass(frozen=True)
class MegatronSource:
    """`path` names the folder, a glob of both kinds of files, or a .bin and its .idx.
    options: exclude (patterns for folders and globs)."""

    path: Inputs
    exclude: Sequence[str] = ()

    @property
    def notes(self) -> dict[str, str]:
        return {}

    def shards(self) -> list[Shard]:
        files = {f.url: f for f in self.path.files(("*.bin", "*.idx"), self.exclude)}
        bases = sorted({url.removesuffix(".bin").removesuffix(".idx") for url in files})
        for url in (base + suffix for base in bases for suffix in (".bin", ".idx")):
            if url not in files:
                raise DataError(f"{url} is not among the inputs; Megatron data needs the .bin and the .idx file.")
        return [TokenShard((files[f"{base}.bin"], files[f"{base}.idx"])) for base in bases]


@dataclass(frozen=True)
class NpySource:
    """numpy arrays; pickled objects in them are refused. One dimension is one long document, two are one a row.
    options: include and exclude (patterns), eod_id (a document ends after each such id, whatever the dimensions)."""

    path: Inputs
    include: Sequence[str] = ("*.npy",)
    exclude: Sequence[str] = ()
    eod_id: int | None = None

    @property
    def notes(self) -> dict[str, str]:
        return {}

    def shards(self) -> list[Shard]:
        return [TokenShard((file,), self.eod_id) for file in self.path.files(self.include, self.exclude)]


def _opened(files: Sequence[Path], stack: ExitStack) -> TokenStore:
    if len(files) == 1:
        return open_npy(files[0])
    bin_file, idx_file = files
    if bin_file.parent != idx_file.parent:  # fetched ones lie apart in the cache; the reader wants them side by side
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="truestep-")))
        for file in files:
            (folder / file.name).symlink_to(file.resolve())
        return open_megatron(folder / bin_file.stem)
    return open_megatron(bin_file.with_suffix(""))


def _cut(store: TokenStore, eod_id: int) -> Iterator[np.ndarray]:
    """The ids of a store in documents that end with `eod_id`, and what follows the last one."""
    rest: list[np.ndarray] = []
    for start in range(0, store.num_tokens, _READ_TOKENS):
        ids = store.read(np.array([start]), np.array([min(_READ_TOKENS, store.num_tokens - start)]))
        *whole, tail = np.split(ids, np.flatnonzero(ids == eod_id) + 1)
        for part in whole:
            yield np.concatenate([*rest, part])
            rest = []
        rest.append(tail)
    if any(len(part) for part in rest):
        yield np.concatenate(rest)
