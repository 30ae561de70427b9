"""Stores for tests: from lists of ids, and huge ones that take no space."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from truestep.data.blocks import BlockWriter, commit_folder, digest
from truestep.data.store import FORMAT, StoreWriter, TokenStore, id_type
from truestep.files import canonical

EOD = 0


def make_store(
    path: Path, documents: Sequence[Sequence[int]], vocab_size: int = 1000, block_bytes: int = 64
) -> TokenStore:
    """Documents as given, each followed by EOD (0)."""
    with StoreWriter(path, vocab_size, EOD, block_bytes=block_bytes) as writer:
        writer.append_many([np.array(ids, dtype=np.int64) for ids in documents], sum(map(len, documents)))
        return writer.finish({})


class Zeros(BlockWriter):
    """A sparse file of zeros, with the sums it would have had."""

    def __init__(self, path: Path, num_bytes: int, block_bytes: int):
        with path.open("wb") as file:
            file.truncate(num_bytes)
        whole, rest = divmod(num_bytes, block_bytes)
        self.path, self.num_bytes, self.block_bytes = path, num_bytes, block_bytes
        self.sums = [xxhash.xxh3_64_intdigest(bytes(block_bytes))] * whole
        self.sums += [xxhash.xxh3_64_intdigest(bytes(rest))] if rest else []

    def finish(self) -> None:
        """Nothing is left to write."""


def sparse_store(path: Path, offsets: np.ndarray, vocab_size: int = 50_000, block_bytes: int = 1 << 20) -> TokenStore:
    """A store of zeros with these document offsets, however large."""
    path.mkdir(parents=True)
    width = id_type(vocab_size)
    tokens = Zeros(path / "tokens.bin", int(offsets[-1]) * width.itemsize, block_bytes)
    starts = BlockWriter(path / "offsets.bin", block_bytes)
    starts.write(offsets.astype("<i8"))
    header = {"vocab_size": vocab_size, "eod_id": EOD, "id_type": width.str, "num_tokens": int(offsets[-1])}
    header |= {"num_documents": len(offsets) - 1, "num_bytes": 0, "report": {}}
    commit_folder(path, FORMAT, (tokens, starts), header)
    return TokenStore.open(path)


def memory_store(documents: Sequence[Sequence[int]], name: str = "memory") -> TokenStore:
    """Documents exactly as given, nothing added, on no disk."""
    ids = np.array([i for document in documents for i in document], dtype=np.uint16)
    offsets = np.cumsum([0, *map(len, documents)])
    fingerprint = digest(canonical([list(map(int, d)) for d in documents]))
    return TokenStore(Path(name), ids, lambda index: offsets[index], len(documents), fingerprint, {})


def numbered(lengths: Sequence[int], first: int = 1) -> TokenStore:
    """Documents of these lengths whose tokens count up from `first` over the whole store."""
    starts = np.cumsum([first, *lengths])
    return memory_store([range(a, a + n) for a, n in zip(starts, lengths)])


def merge_stores(path: str | Path, shards: Sequence[TokenStore], report: dict[str, Any]) -> TokenStore:
    """One store with the documents of `shards` in order; the shards stay as they are."""
    first = shards[0]
    assert first.vocab_size is not None and first.eod_id is not None
    with StoreWriter(path, first.vocab_size, first.eod_id, block_bytes=first.header["block_bytes"]) as writer:
        for shard in shards:
            writer.append_store(shard)
        return writer.finish(report)
