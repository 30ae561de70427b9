"""Scrub: read every byte of a checkpoint and compare every block with its digest. Torch-free."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from truestep.checkpoint.catalogue import Committed, read_manifest
from truestep.checkpoint.manifest import Chunk, Manifest, block_digest
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import MissingKey, Store


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong: the object, the tensor if one is hit, and a sentence. Not `certain` if the store did not
    answer: the bytes may be right."""

    key: str
    tensor: str | None
    text: str
    certain: bool = True


def unwatched(num_bytes: int) -> None:
    """Nobody looks on."""


def verify(store: Store, committed: Committed, watch: Callable[[int], None] = unwatched) -> list[Damage]:
    """Everything that is wrong with a checkpoint; an empty list means that every byte is as it was saved.

    `watch` is told after each read how many bytes came; it may wait (to leave the machine to others) or raise (to end).
    """
    try:
        manifest = read_manifest(store, committed)
    except (CheckpointError, MissingKey) as error:
        return [Damage(committed.key, None, str(error))]
    except StorageError as error:
        return [Damage(committed.key, None, str(error), certain=False)]
    chunks = manifest.chunks_by_object()
    return [damage for key in manifest.objects for damage in _verify_object(store, manifest, key, chunks[key], watch)]


def _verify_object(
    store: Store, manifest: Manifest, key: str, chunks: list[tuple[str, Chunk]], watch: Callable[[int], None]
) -> Iterator[Damage]:
    size = None
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
            watch(stop - start)
    except StorageError as error:
        short = size is not None and size < manifest.objects[key].size
        yield Damage(key, None, str(error), certain=short or isinstance(error, MissingKey))


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
