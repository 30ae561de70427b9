"""Which checkpoints exist: create-only epochs and commits, and the rule by which a commit counts. Torch-free.

    epochs/<n>              an attempt, and the commits it honours
    commits/<step>-<epoch>  a checkpoint, by its manifest's key and SHA-256
    steps/...               data objects and manifests, which count for nothing without a commit
    marks/<step>-<epoch>/   what became of a checkpoint since (truestep.checkpoint.marks)

A commit counts if its epoch is the newest one, or if the newest epoch names it. So an attempt that was paused and
superseded can write what it likes: no reader honours it.
"""

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass

from truestep.checkpoint.manifest import Manifest
from truestep.checkpoint.marks import deleted_on_purpose, quarantined
from truestep.checkpoint.sealed import Committed, seal, unseal
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import KeyExists, Store
from truestep.storage.probe import require_safe

_EPOCH = re.compile(r"epochs/(\d{6})")


@dataclass(frozen=True)
class Epoch:
    """An attempt's number and the commits that it honours, by key."""

    number: int
    honours: tuple[str, ...]


@dataclass(frozen=True)
class Catalogue:
    """The commits that count, oldest first; those that the newest epoch names but that are gone; its number."""

    commits: list[Committed]
    lost: list[Committed]
    epoch: int


def _newest_epoch(store: Store) -> Epoch:
    numbers = [int(match[1]) for entry in store.list("epochs") if (match := _EPOCH.fullmatch(entry.key))]
    if not numbers:
        return Epoch(0, ())
    key = f"epochs/{max(numbers):06d}"
    body = unseal(store.get(key), f"{store.url}/{key}")
    if body["epoch"] != max(numbers):
        raise CheckpointError(f"{store.url}/{key}: holds the record of epoch {body['epoch']}; restore it from a copy")
    return Epoch(body["epoch"], tuple(body["honours"]))


def read_catalogue(store: Store) -> Catalogue:
    """All commits that count at this moment. Objects that are no commits are not looked at."""
    commits = {found for entry in store.list("commits") if (found := Committed.parse(entry.key))}
    epoch = _newest_epoch(store)  # read after the commits, so that it can only take away from them
    honoured = sorted(c for c in commits if c.epoch >= epoch.number or c.key in epoch.honours)
    gone = sorted(c for key in epoch.honours if (c := Committed.parse(key)) and c not in commits)
    lost = [committed for committed in gone if not deleted_on_purpose(store, committed)]
    return Catalogue(honoured, lost, epoch.number)


def list_committed(store: Store) -> list[Committed]:
    """The honoured commits, oldest first."""
    return read_catalogue(store).commits


def begin_epoch(store: Store, quarantine: Collection[str] = ()) -> Epoch:
    """Fence off every earlier attempt: create the next epoch, which honours what counts now less `quarantine`.

    Those that a mark quarantines stay honoured, so that they are listed, can be released, and are deleted in their
    time; readers pass them over.
    Rank 0 calls this once at the start of an attempt and gives the number to all ranks' Checkpointers. The store is
    probed on first use and refused if it cannot commit safely.
    """
    require_safe(store)
    while True:
        catalogue = read_catalogue(store)
        honours = tuple(commit.key for commit in catalogue.commits if commit.key not in quarantine)
        epoch = Epoch(catalogue.epoch + 1, honours)
        store.event("epoch to be created")
        try:
            store.create(f"epochs/{epoch.number:06d}", seal({"epoch": epoch.number, "honours": list(honours)}))
        except KeyExists:
            continue  # another attempt was quicker: fence that one off too
        return epoch


def commit(store: Store, committed: Committed, manifest_key: str, manifest_sha256: str) -> None:
    """Create the commit, unless the attempt was superseded. If the answer was lost, what the store holds decides."""
    newest = _newest_epoch(store).number
    if newest > committed.epoch:
        raise CheckpointError(
            f"{store.url}: epoch {committed.epoch} was superseded by {newest}; this attempt must stop"
        )
    record = seal(
        {"step": committed.step, "epoch": committed.epoch, "manifest": manifest_key, "sha256": manifest_sha256}
    )
    store.event("commit to be created")
    try:
        store.create(committed.key, record)
    except StorageError as error:
        try:
            present = store.get(committed.key)
        except StorageError:
            raise error from None
        if present != record:
            raise
    store.event("commit created")


def read_manifest(store: Store, committed: Committed) -> Manifest:
    """The manifest that a commit vouches for, byte for byte; CheckpointError or StorageError if it is not there."""
    where = f"{store.url}/{committed.key}"
    body = unseal(store.get(committed.key), where)
    if (body["step"], body["epoch"]) != (committed.step, committed.epoch):
        raise CheckpointError(
            f"{where}: holds the commit of step {body['step']}, epoch {body['epoch']}; it was swapped"
        )
    data = store.get(body["manifest"])
    where = f"{store.url}/{body['manifest']}"
    if hashlib.sha256(data).hexdigest() != body["sha256"]:
        raise CheckpointError(f"{where}: the manifest's SHA-256 is not the one that was committed; the file is damaged")
    manifest = Manifest.from_bytes(data, where)
    if (manifest.step, manifest.epoch) != (committed.step, committed.epoch):
        raise CheckpointError(f"{where}: the manifest is of step {manifest.step}; it was swapped")
    return manifest


def newest(store: Store, quarantine: Collection[str] = ()) -> Committed | None:
    """The newest honoured commit whose manifest verifies and that is not quarantined, by a mark or here by its key."""
    quarantine = quarantined(store).union(quarantine)
    for committed in reversed(list_committed(store)):
        if committed.key not in quarantine:
            try:
                read_manifest(store, committed)
            except (CheckpointError, StorageError):
                continue  # verify() names the damage; load_newest() tells of every one it passes over
            return committed
    return None
