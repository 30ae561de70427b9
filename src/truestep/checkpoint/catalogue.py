"""Which checkpoints exist: create-only fences, epochs and commits, and the rule by which a commit counts. Torch-free.

    commits/fence-<n>       attempt n has begun: every earlier one must stop
    epochs/<n>              the commits that attempt n honours, read after its fence was there
    commits/<step>-<epoch>  a checkpoint, by its manifest's key and SHA-256
    steps/...               data objects and manifests, which count for nothing without a commit
    marks/<step>-<epoch>/   what became of a checkpoint since (truestep.checkpoint.marks)

A commit counts if its epoch is the newest one, or if the newest epoch names it. So an attempt that was paused and
superseded can write what it likes: no reader honours it. And no commit that an attempt was told of is lost: it looks
for fences once more after its commit, and whoever fences it off reads the commits after the fence, so one of the two
sees the other. Fences lie among the commits: one listing shows both, and a listing that lacks what its caller has just
put there is known to be of the past.
"""

import hashlib
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field

from truestep.checkpoint.manifest import Manifest
from truestep.checkpoint.marks import being_deleted, quarantined
from truestep.checkpoint.sealed import Committed, seal, unseal
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import KeyExists, MissingKey, Store, Undurable
from truestep.storage.probe import require_safe

_FENCE = re.compile(r"commits/fence-(\d{6})")
_EPOCH = re.compile(r"epochs/(\d{6})")
LATE_LISTS_S = (0.0, 0.1, 0.5, 2.0, 10.0)
"""Pauses before looking again into a store that still lists what was there before."""


class Superseded(CheckpointError):
    """A newer attempt has begun; this one must stop."""


@dataclass(frozen=True)
class Epoch:
    """An attempt's number and the commits that it honours, by key."""

    number: int
    honours: tuple[str, ...]


@dataclass(frozen=True)
class Catalogue:
    """The commits that count, oldest first; those that the newest epoch names but that are lost; its number; and those
    that it names and that are gone, lost or deleted on purpose."""

    commits: list[Committed]
    lost: list[Committed]
    epoch: int
    gone: list[Committed] = field(default_factory=list)


def _numbers(pattern: re.Pattern[str], keys: Collection[str]) -> set[int]:
    return {int(match[1]) for key in keys if (match := pattern.fullmatch(key))}


def _fence(number: int) -> str:
    return f"commits/fence-{number:06d}"


def _keys(store: Store, expected: str = "") -> set[str]:
    """All names in commits/, as of a moment when `expected` was among them. A store that still lists what was there
    before is asked again, and given up after some seconds."""
    for wait_s in LATE_LISTS_S:
        if wait_s:
            time.sleep(wait_s)
        keys = {entry.key for entry in store.list("commits")}
        if not expected or expected in keys:
            return keys
    raise StorageError(f"{store.url}: lists what was there before {expected} was stored; use another store")


def create_once(store: Store, key: str, data: bytes) -> None:
    """Create an object whose bytes nobody else writes; KeyExists if the name holds others. If the answer was lost, what
    the store holds decides."""
    try:
        store.create(key, data)
    except Undurable:
        raise
    except StorageError as error:
        try:
            present = store.get(key)
        except StorageError:
            raise error from None
        if present != data:
            raise KeyExists(f"{store.url}/{key}: exists already and was left as it is") from None


def _newest_epoch(store: Store, keys: Collection[str]) -> Epoch:
    """The newest attempt that has said what it honours; one that died before it did changes nothing."""
    begun = _numbers(_FENCE, keys) | _numbers(_EPOCH, {entry.key for entry in store.list("epochs")})
    for number in sorted(begun, reverse=True):
        key = f"epochs/{number:06d}"
        try:
            body = unseal(store.get(key), f"{store.url}/{key}")
        except MissingKey:
            continue
        if body.keys() != {"epoch", "honours"} or body["epoch"] != number:
            raise CheckpointError(f"{store.url}/{key}: holds another record; it was swapped; restore it from a copy")
        return Epoch(number, tuple(body["honours"]))
    return Epoch(0, ())


def read_catalogue(store: Store, attempt: int = 0) -> Catalogue:
    """All commits that count at this moment. Objects that are no commits are not looked at.

    `attempt`: one that has begun for sure, so that a listing from before its time is not believed.
    """
    keys = _keys(store, _fence(attempt) if attempt else "")
    epoch = _newest_epoch(store, keys)  # read after the commits, so that it can only take away from them
    if not {*epoch.honours} <= keys:
        keys |= _keys(store)  # a commit came between the two looks, or is gone
    commits = {found for key in keys if (found := Committed.parse(key))}
    if orphans := {commit.epoch for commit in commits if commit.epoch > epoch.number}:
        key = f"epochs/{max(orphans):06d}"
        raise CheckpointError(
            f"{store.url}/{key}: is gone, but there are commits of this epoch; restore it from a copy"
        )
    honoured = sorted(c for c in commits if c.epoch == epoch.number or c.key in epoch.honours)
    gone = sorted(c for key in epoch.honours if (c := Committed.parse(key)) and c not in commits)
    on_purpose = being_deleted(store) if gone else set()
    store.event("catalogue read")
    return Catalogue(honoured, [c for c in gone if c.key not in on_purpose], epoch.number, gone)


def list_committed(store: Store) -> list[Committed]:
    """The honoured commits, oldest first."""
    return read_catalogue(store).commits


def begin_epoch(store: Store, quarantine: Collection[str] = ()) -> Epoch:
    """Fence off every earlier attempt, then create the epoch, which honours what counts now less `quarantine`.

    Those that a mark quarantines stay honoured, so that they are listed, can be released, and are deleted in their
    time; readers pass them over.
    Rank 0 calls this once at the start of an attempt and gives the number to all ranks' Checkpointers. The store is
    probed on first use and refused if it cannot commit safely.
    """
    require_safe(store)
    number = _fence_off(store)
    commits = read_catalogue(store, number).commits
    honours = [commit.key for commit in commits if commit.key not in quarantine]
    store.event("epoch to be created")
    create_once(store, f"epochs/{number:06d}", seal({"epoch": number, "honours": honours}))
    store.event("epoch created")
    return Epoch(number, tuple(honours))


def _fence_off(store: Store) -> int:
    """The number of a new attempt: one more than any that has begun."""
    taken = ""
    while True:
        epochs = {entry.key for entry in store.list("epochs")}
        number = max(_numbers(_FENCE, _keys(store, taken)) | _numbers(_EPOCH, epochs), default=0) + 1
        store.event("fence to be created")
        try:
            create_once(store, _fence(number), seal({"epoch": number, "attempt": uuid.uuid4().hex}))
        except KeyExists:
            taken = _fence(number)  # another attempt was quicker: fence that one off too
            continue
        store.event("fence created")
        return number


def commit(store: Store, committed: Committed, manifest_key: str, manifest_sha256: str) -> None:
    """Create the commit, durably, unless the attempt was superseded (Superseded)."""
    _require_newest(store, committed, "")
    record = seal(
        {"step": committed.step, "epoch": committed.epoch, "manifest": manifest_key, "sha256": manifest_sha256}
    )
    store.event("commit to be created")
    create_once(store, committed.key, record)
    store.event("commit created")
    _require_newest(store, committed, committed.key)
    store.event("commit confirmed")


def _require_newest(store: Store, committed: Committed, created: str) -> None:
    """Superseded if a newer attempt has begun, unless it names the commit that was `created`."""
    keys = _keys(store, created)
    newest = max(_numbers(_FENCE, keys), default=0)
    if newest > committed.epoch and created not in _newest_epoch(store, keys).honours:
        raise Superseded(f"{store.url}: epoch {committed.epoch} was superseded by {newest}; this attempt must stop")


@dataclass(frozen=True)
class CommitRecord:
    """What a commit vouches for: the manifest's key and SHA-256."""

    manifest: str
    sha256: str


def read_commit(store: Store, committed: Committed) -> CommitRecord:
    """What a commit says; CheckpointError if it is damaged, StorageError if it is not there."""
    where = f"{store.url}/{committed.key}"
    body = unseal(store.get(committed.key), where)
    if "manifest" not in body:
        raise CheckpointError(f"{where}: holds another record; it was swapped")
    if (body["step"], body["epoch"]) != (committed.step, committed.epoch):
        raise CheckpointError(
            f"{where}: holds the commit of step {body['step']}, epoch {body['epoch']}; it was swapped"
        )
    return CommitRecord(body["manifest"], body["sha256"])


def read_manifest(store: Store, committed: Committed) -> Manifest:
    """The manifest that a commit vouches for, byte for byte; CheckpointError or StorageError if it is not there."""
    record = read_commit(store, committed)
    store.event("commit read")
    data = store.get(record.manifest)
    where = f"{store.url}/{record.manifest}"
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise CheckpointError(f"{where}: the manifest's SHA-256 is not the one that was committed; the file is damaged")
    manifest = Manifest.from_bytes(data, where)
    if (manifest.step, manifest.epoch) != (committed.step, committed.epoch):
        raise CheckpointError(f"{where}: the manifest is of step {manifest.step}; it was swapped")
    store.event("manifest read")
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
