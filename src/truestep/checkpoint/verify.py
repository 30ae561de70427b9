"""Scrub: read every byte of a checkpoint and compare every block with its digest. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass

from truestep.checkpoint.catalogue import Committed, read_manifest
from truestep.checkpoint.manifest import Chunk, Manifest, block_digest
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import Store


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong: the object, the tensor if one is hit, and a sentence."""

    key: str
    tensor: str | None
    text: str


def verify(store: Store, committed: Committed) -> list[Damage]:
    """Everything that is wrong with a checkpoint; an empty list means that every byte is as it was saved."""
    try:
        manifest = read_manifest(store, committed)
    except (CheckpointError, StorageError) as error:
        return [Damage(committed.key, None, str(error))]
    chunks = manifest.chunks_by_object()
    return [damage for key in manifest.objects for damage in _verify_object(store, manifest, key, chunks[key])]


def _verify_object(store: Store, manifest: Manifest, key: str, chunks: list[tuple[str, Chunk]]) -> Iterator[Damage]:
    try:
        size = store.head(key).size
        if size > manifest.objects[key].size:
            yield Damage(key, None, f"{store.url}/{key}: holds {size} bytes instead of {manifest.objects[key].size}")
        for blocks in _requests(chunks, store.request_bytes):
            start, stop = blocks[0][1], blocks[-1][2]
            data = memoryview(store.get_range(key, start, stop))
            for name, first, last, digest in blocks:
                if block_digest(data[first - start : last - start]) != digest:
                    yield Damage(key, name, f"{store.url}/{key}: bytes {first} to {last} of tensor {name} are damaged")
    except StorageError as error:
        yield Damage(key, None, str(error))


def _requests(chunks: list[tuple[str, Chunk]], request_bytes: int) -> Iterator[list[tuple[str, int, int, str]]]:
    """(tensor, start, stop, digest) of all blocks of an object, in order, in groups of one request's size."""
    group: list[tuple[str, int, int, str]] = []
    for name, chunk in chunks:
        for block in range(chunk.num_blocks):
            group.append((name, *chunk.block_range(block), chunk.digest(block)))
            if group[-1][2] - group[0][1] >= request_bytes:
                yield group
                group = []
    if group:
        yield group
