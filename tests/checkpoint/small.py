"""Checkpoints of a few bytes made without torch, for tests of what happens to whole checkpoints."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from truestep.checkpoint.catalogue import begin_epoch, commit, list_committed, read_commit
from truestep.checkpoint.manifest import Chunk, Manifest, TensorEntry, block_digest, describe_object
from truestep.checkpoint.sealed import Committed
from truestep.checkpoint.verify import verify
from truestep.storage.disk import Disk
from truestep.storage.interface import Store


class Crash(Exception):
    """What a test raises in the middle of a protocol."""


class At:
    """An event hook that counts, and acts once: at the k-th event (from 1), or at the first of a name."""

    def __init__(self, act: Callable[[], object] = lambda: None, k: int | str = 0):
        self.names: list[str] = []
        self.act, self.k = act, k

    def __call__(self, name: str) -> None:
        self.names.append(name)
        if self.k in (len(self.names), name):
            self.k = 0
            self.act()


class Unsynced(Disk):
    """A disk that is never asked to sync: for tests that crash processes and not machines."""

    def sync(self, handle: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


def crash() -> None:
    raise Crash


def tiny_save(store: Store, step: int, epoch: int = 0, serial: int = 1, ranks: int = 2) -> Committed:
    """Commit one tensor of eight bytes a rank, as the writer does. epoch 0: begin the next."""
    committed = Committed(step, epoch or begin_epoch(store).number)
    folder = f"steps/{committed.name}-{serial:04d}"
    chunks = []
    for rank in range(ranks):
        data = bytes((step + rank + i) % 256 for i in range(8))
        key = f"{folder}/rank-{rank:05d}.bin"
        store.put(key, data)
        chunks.append(Chunk((8 * rank,), (8,), key, 0, 8, 16, block_digest(data)))
    objects = {chunk.object: describe_object([chunk]) for chunk in chunks}
    tensors = {"model.w": TensorEntry((8 * ranks,), "uint8", tuple(chunks))}
    data = Manifest(step, committed.epoch, tensors, objects=objects).to_bytes()
    store.put(f"{folder}/manifest.json", data)
    commit(store, committed, f"{folder}/manifest.json", hashlib.sha256(data).hexdigest())
    return committed


def spoil(store: Store, committed: Committed) -> str:
    """Change a byte of a data object, whose key is returned."""
    folder = read_commit(store, committed).manifest.rpartition("/")[0]
    key = f"{folder}/rank-00001.bin"
    data = bytearray(store.get(key))
    data[3] ^= 1
    store.delete(key)
    store.put(key, bytes(data))
    return key


def assert_whole(store: Store) -> None:
    """Every listed checkpoint has each of its bytes."""
    for committed in list_committed(store):
        assert verify(store, committed) == []
