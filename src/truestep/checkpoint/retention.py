"""Which checkpoints are deleted, and how, so that no crash leaves a broken one. Torch-free.

Only what the catalogue lists is ever deleted, and of that never one that is pinned, that the run went on from, that is
the newest, or that has fewer than `keep` newer ones that are verified and not quarantined. A deletion goes

    mark `deleting` → look again → delete the commit → delete manifest and data → forget the marks

so a crash leaves either a whole checkpoint or no commit; the next pass decides anew about the former and clears away
what is left of the latter. Whoever pins first marks and then looks whether a deletion has begun, while a deletion first
marks and then looks for pins: one of the two sees the other.

An attempt that was superseded deletes nothing more, since the newest epoch is looked at before every deletion. A reader
that loads a checkpoint while it is deleted (an export, a drill; a run begins with the newest) finds blocks missing: it
fails in words or takes another, and never gets wrong bytes.
"""

from collections.abc import Collection
from dataclasses import dataclass

from truestep.checkpoint.catalogue import Catalogue, read_catalogue, read_commit
from truestep.checkpoint.clearing import clear_folder
from truestep.checkpoint.marks import Mark, Standing, forget_marks, mark, marks_of, marks_on, standing
from truestep.checkpoint.sealed import Committed
from truestep.errors import CheckpointError
from truestep.storage.interface import Store, remove


@dataclass(frozen=True)
class Policy:
    """How many verified checkpoints to keep, the newest (0: all), and every how many steps one is kept besides."""

    keep: int
    keep_every: int = 0


@dataclass(frozen=True)
class Fate:
    """What the policy says of one checkpoint: `kept` is the reason to keep it; it is empty if there is none."""

    committed: Committed
    kept: str
    standing: Standing


@dataclass(frozen=True)
class Retained:
    """What a pass did: keys of the commits that it deleted, bytes freed, commits left, and what it could not do."""

    deleted: list[str]
    num_bytes: int
    kept: int
    notes: list[str]


def fates(store: Store, policy: Policy, restored: Collection[str] = ()) -> list[Fate]:
    """What the policy says now of every listed checkpoint, oldest first. `restored`: keys of those in use."""
    catalogue, marks = read_catalogue(store), marks_of(store)
    return _fates(catalogue, {c: standing(marks.get(c, [])) for c in catalogue.commits}, policy, restored)


def _fates(
    catalogue: Catalogue, standings: dict[Committed, Standing], policy: Policy, restored: Collection[str]
) -> list[Fate]:
    clean = [c for c in catalogue.commits if standings[c].quarantined is None]
    verified = [c for c in clean if standings[c].is_verified]

    def reason(c: Committed) -> str:
        newer = sum(other > c for other in verified)
        if policy.keep < 1:
            return "all are kept"
        if standings[c].pinned:
            return "it is pinned"
        if c.key in restored:
            return "the run went on from it"
        if c == max(clean, default=None):
            return "it is the newest"
        if policy.keep_every and c in clean and c.step % policy.keep_every == 0:
            return f"every {policy.keep_every} steps one is kept"
        if newer < policy.keep:
            return f"{newer} newer ones are verified, {policy.keep} are to be kept"
        return ""

    return [Fate(c, reason(c), standings[c]) for c in catalogue.commits]


def retain(
    store: Store, policy: Policy, restored: Collection[str] = (), *, epoch: int | None = None, limit: int | None = None
) -> Retained:
    """Delete what the policy does not keep, oldest first, and finish deletions that a crash cut short.

    epoch: that of the attempt that asks (None: a person); nothing is deleted once it was superseded. limit: delete at
    most so many. StorageError if the store does not answer; what could not be deleted for another reason is in `notes`.
    """
    notes: list[str] = []
    freed = _finish_all(store, notes)
    deleted: list[str] = []
    for fate in fates(store, policy, restored):
        if fate.kept:
            if fate.standing.deleting:
                mark(store, fate.committed, "kept", reason=fate.kept)  # a crash, and things have changed since
        elif limit is None or len(deleted) < limit:
            try:
                freed += _delete(store, fate.committed, policy, restored, epoch)
                deleted.append(fate.committed.key)
            except CheckpointError as error:
                notes.append(str(error))
    return Retained(deleted, freed, len(read_catalogue(store).commits), notes)


def pin(store: Store, committed: Committed, **facts: str) -> Mark:
    """Have retention leave a checkpoint alone. CheckpointError if it is gone or its deletion has begun."""
    if committed not in read_catalogue(store).commits:
        raise CheckpointError(f"{store.url}/{committed.key}: there is no such checkpoint; choose one that is listed")
    made = mark(store, committed, "pinned", **facts)
    if standing(marks_on(store, committed)).deleting or committed not in read_catalogue(store).commits:
        raise CheckpointError(
            f"{store.url}/{committed.key}: its deletion had begun before it was pinned; see whether it is still listed"
        )
    return made


def _delete(store: Store, committed: Committed, policy: Policy, restored: Collection[str], epoch: int | None) -> int:
    """Delete one checkpoint; bytes freed. CheckpointError if it must stay, and why."""
    key = read_commit(store, committed).manifest
    folder = key.rpartition("/")[0]
    if not folder.startswith(f"steps/{committed.name}-"):
        raise CheckpointError(f"{store.url}/{committed.key}: names objects of another save; it is left as it is")
    mark(store, committed, "deleting", folder=folder)
    store.event("deletion marked")
    fate = next((f for f in fates(store, policy, restored) if f.committed == committed), None)
    if fate is None:  # another process deleted it: the mark stays and says that it was on purpose
        raise CheckpointError(f"{store.url}/{committed.key}: is gone already")
    reason = fate.kept
    newest = read_catalogue(store).epoch
    if epoch is not None and newest > epoch:
        reason = f"epoch {epoch} was superseded by {newest}"
    if reason:
        mark(store, committed, "kept", reason=reason)
        raise CheckpointError(f"{store.url}/{committed.key}: is not deleted after all: {reason}")
    store.event("commit to be deleted")
    remove(store, committed.key)
    store.event("commit deleted")
    return _finish(store, committed, folder)


def _finish_all(store: Store, notes: list[str]) -> int:
    """Clear away what is left of every checkpoint whose commit was deleted; bytes freed."""
    freed = 0
    listed = {entry.key for entry in store.list("commits")}
    for committed, marks in marks_of(store, ["deleting", "kept"]).items():
        if committed.key in listed or not standing(marks).deleting:
            continue
        last = marks[-1]
        if last.facts.get("done"):
            _forget(store, committed)
        elif last.damaged:
            notes.append(f"{store.url}: its mark does not say any more what is left of {committed.key}; sweep")
        else:
            freed += _finish(store, committed, last.facts["folder"])
    return freed


def _finish(store: Store, committed: Committed, folder: str) -> int:
    """Delete manifest and data objects of a checkpoint that has no commit any more; bytes freed."""
    freed = clear_folder(store, folder)
    mark(store, committed, "deleting", done=True)
    _forget(store, committed)
    return freed


def _forget(store: Store, committed: Committed) -> None:
    """Remove the marks, unless the newest epoch names the commit: they say that it is not missing by accident."""
    if committed not in read_catalogue(store).gone:
        forget_marks(store, committed)
