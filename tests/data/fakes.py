"""Stores for tests: from lists of ids, and huge ones that take no space."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from truestep.data.blocks import BlockWriter, commit_folder
from truestep.data.store import FORMAT, StoreWriter, TokenStore, id_type

EOD = 0


def make_store(
    path: Path, documents: Sequence[Sequence[int]], vocab_size: int = 1000, block_bytes: int = 64
) -> TokenStore:
    """Documents as given, each followed by EOD (0)."""
    with StoreWriter(path, vocab_size, EOD, block_bytes=block_bytes) as writer:
        writer.append_many([np.array(ids, dtype=np.int64) for ids in documents], sum(map(len, documents)))
        return writer.finish({})


def numbered_store(path: Path, lengths: Sequence[int], block_bytes: int = 1 << 10) -> TokenStore:
    """Documents of these lengths (EOD included, so at least 1) whose tokens count up from 1 over the whole store."""
    first = np.cumsum([0, *lengths]) + 1
    documents = [np.append(np.arange(a, a + n - 1), EOD) for a, n in zip(first, lengths)]
    with StoreWriter(path, 1 << 20, EOD, block_bytes=block_bytes) as writer:
        writer.append_many(documents, 0)
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
