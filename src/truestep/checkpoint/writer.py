"""DCP's StorageWriter over our stores: raw bytes, a digest for every block, a manifest, a create-only commit."""

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from truestep.checkpoint.catalogue import Committed, commit
from truestep.checkpoint.codec import dtype_name, write_data
from truestep.checkpoint.manifest import Chunk, Manifest, TensorEntry, block_digest, describe_object
from truestep.errors import CheckpointError
from truestep.numerics.digest import raw_bytes
from truestep.storage.interface import Store

SMALLEST_BLOCK = 64 << 10
BLOCKS_A_CHUNK = 64


def always_wanted() -> None:
    """Nobody gives the save up."""


def block_size(num_bytes: int, block_bytes: int) -> int:
    """Bytes that one digest covers in a chunk: at most `block_bytes`, smaller in small chunks.

    A reader that wants a quarter of a chunk must fetch whole blocks to verify them, so a chunk has about 64 blocks,
    unless they would be too small to be worth a digest.
    """
    wanted = max(SMALLEST_BLOCK, num_bytes // BLOCKS_A_CHUNK)
    return min(block_bytes, 1 << (wanted - 1).bit_length())


class BlockWriter(StorageWriter):
    """Writes one save of one rank. Object names hold step, epoch, serial and rank, so none is ever used twice. `check`
    raises if the save has been given up; it is called last before the commit."""

    def __init__(
        self,
        store: Store,
        committed: Committed,
        serial: int,
        rank: int,
        block_bytes: int,
        check: Callable[[], None] = always_wanted,
    ):
        self.store, self.committed, self.rank, self.block_bytes = store, committed, rank, block_bytes
        self.check = check
        self.folder = committed.folder(serial)
        self.aliases: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """One writer serves one save; there is nothing to forget."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to make ready: stores create folders as they write."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False  # a store is opened by truestep.storage, not from a path

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Drop the empty parts of unevenly sharded tensors and the names that are stored under another."""
        return SavePlan([item for item in plan.items if self._is_stored(item)])

    def _is_stored(self, item: WriteItem) -> bool:
        data = write_data(item)
        return item.index.fqn not in self.aliases and (data.chunk.sizes.numel() > 0 or data.size.numel() == 0)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuse ranks that disagree about a tensor's shape or dtype (DCP takes the first one's word)."""
        seen: dict[str, tuple] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                data = write_data(item)
                mine = (list(data.size), dtype_name(data.properties.dtype))
                if seen.setdefault(item.index.fqn, mine) != mine:
                    raise CheckpointError(
                        f"{item.index.fqn}: rank {rank} has {mine}, another rank {seen[item.index.fqn]}"
                    )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks to one object; each block is hashed from the staged tensor, before it is written."""
        key = f"{self.folder}/rank-{self.rank:05d}.bin"
        items = sorted(plan.items, key=lambda item: -write_data(item).properties.dtype.itemsize)
        results: list[WriteResult] = []

        def pieces() -> Iterator[memoryview]:
            start = 0
            for item in items:
                data, tensor = write_data(item), planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                view = raw_bytes(tensor)
                step = block_size(len(view), self.block_bytes)
                digests = []
                for first in range(0, len(view), step):
                    block = view[first : first + step]
                    digests.append(block_digest(block))
                    yield block
                where = (tuple(data.chunk.offsets), tuple(data.chunk.sizes))
                chunk = Chunk(*where, key, start, len(view), step, "".join(digests))
                results.append(WriteResult(item.index, len(view), chunk))
                start += len(view)

        size = sum(write_data(item).chunk.sizes.numel() * write_data(item).properties.dtype.itemsize for item in items)
        if size and self.store.put_parts(key, pieces(), size) != size:
            raise CheckpointError(f"{self.store.url}/{key}: not all of the {size} planned bytes were written")
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check what all ranks wrote, store the manifest, commit. Only the coordinator calls this."""
        self.manifest = self._manifest(metadata, [result for part in results for result in part])
        present = {entry.key: entry.size for entry in self.store.list(self.folder)}
        for key, entry in self.manifest.objects.items():
            if present.get(key) != entry.size:
                found = f"holds {present[key]} bytes" if key in present else "is not there"
                raise CheckpointError(f"{self.store.url}/{key}: {found}, but {entry.size} bytes were written")
        self.store.event("objects checked")
        data, key = self.manifest.to_bytes(), f"{self.folder}/manifest.json"
        self.manifest_sha256 = hashlib.sha256(data).hexdigest()
        self.store.put(key, data)
        self.check()
        commit(self.store, self.committed, key, self.manifest_sha256)

    def _manifest(self, metadata: Metadata, results: list[WriteResult]) -> Manifest:
        chunks: dict[str, list[Chunk]] = {}
        by_object: dict[str, list[Chunk]] = {}
        for result in results:
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
            if result.size_in_bytes:
                by_object.setdefault(result.storage_data.object, []).append(result.storage_data)
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            found = tuple(chunk for chunk in chunks.get(name, []) if chunk.num_bytes)
            tensors[name] = TensorEntry(tuple(entry.size), dtype_name(entry.properties.dtype), found)
        objects = {key: entry for key, found in by_object.items() if (entry := describe_object(found))}
        manifest = Manifest(
            self.committed.step, self.committed.epoch, tensors, self.aliases, objects, self.extra, self.facts
        )
        manifest.check(f"{self.store.url}/{self.folder}")
        return manifest


def result_to_json(results: list[WriteResult]) -> list[list[Any]]:
    return [[result.index.fqn, *result.storage_data.to_json()] for result in results]


def result_from_json(rows: list[list[Any]]) -> list[WriteResult]:
    found = []
    for name, *row in rows:
        chunk = Chunk.from_json(row)
        found.append(WriteResult(MetadataIndex(name, chunk.offsets), chunk.num_bytes, chunk))
    return found
