"""What crashed saves and superseded attempts left behind: found, told, and removed. Torch-free.

Left alone is everything of the newest epoch, whose attempt may be saving at this moment, and everything that an
honoured commit names. What is removed is unreachable for every reader already.
"""

import os
import time
from dataclasses import dataclass, field

from truestep.checkpoint.catalogue import read_catalogue, read_commit
from truestep.checkpoint.clearing import clear_folder
from truestep.checkpoint.marks import forget_marks, marks_of
from truestep.checkpoint.sealed import Committed, parse_folder
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import Store, remove
from truestep.storage.local import TEMPORARY, LocalStore
from truestep.storage.multipart import Upload, abort_upload, list_uploads
from truestep.storage.objects import ObjectStore

OLD_S = 24 * 3600.0
"""How old a temporary file or an upload must be to be taken for dead: no save runs that long."""


@dataclass(frozen=True)
class Orphans:
    """What nobody needs. folders: step folder -> its bytes. commits: void ones. marks: of commits that are gone.
    temporaries: files of dead writers in a local folder. uploads: unfinished ones in a bucket. notes: what could not be
    looked for, and what to do about it."""

    folders: dict[str, int] = field(default_factory=dict)
    commits: list[Committed] = field(default_factory=list)
    marks: list[Committed] = field(default_factory=list)
    temporaries: dict[str, int] = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        parts = (self.folders, self.commits, self.marks, self.temporaries, self.uploads)
        return sum(len(part) for part in parts)

    @property
    def num_bytes(self) -> int:
        """Without unfinished uploads, whose size nobody tells."""
        return sum(self.folders.values()) + sum(self.temporaries.values())


def plan_sweep(store: Store, older_s: float = OLD_S) -> Orphans:
    """What a sweep would remove now. Temporary files and uploads count when they are older than `older_s`."""
    sizes: dict[str, int] = {}
    epochs: dict[str, int] = {}
    for entry in store.list("steps"):  # before the catalogue: a commit that comes in between takes its folder out
        folder = entry.key.rpartition("/")[0]
        if save := parse_folder(folder):
            sizes[folder] = sizes.get(folder, 0) + entry.size
            epochs[folder] = save[0].epoch
    present = {found for entry in store.list("commits") if (found := Committed.parse(entry.key))}
    marked = marks_of(store).keys()
    catalogue = read_catalogue(store)
    notes: list[str] = []
    used = set()
    for committed in catalogue.commits:
        try:
            used.add(read_commit(store, committed).manifest.rpartition("/")[0])
        except CheckpointError as error:  # it vouches for one of the folders of its name: leave them all
            used |= {folder for folder in sizes if folder.startswith(f"steps/{committed.name}-")}
            notes.append(str(error))
    old = {folder: size for folder, size in sizes.items() if epochs[folder] < catalogue.epoch and folder not in used}
    void = sorted(c for c in present if c not in catalogue.commits and c.epoch < catalogue.epoch)
    gone = {c for c in marked if c not in present and c.epoch < catalogue.epoch and c not in catalogue.gone}
    temporaries = _temporaries(store, older_s) if isinstance(store, LocalStore) else {}
    uploads = _uploads(store, older_s, notes) if isinstance(store, ObjectStore) else []
    return Orphans(old, void, sorted(gone | (set(void) & set(marked))), temporaries, uploads, notes)


def sweep(store: Store, found: Orphans) -> int:
    """Remove what `plan_sweep` found; bytes freed. Void commits go first, so that none ever names what is not there."""
    freed = 0
    for committed in found.commits:
        remove(store, committed.key)
    for folder in found.folders:
        freed += clear_folder(store, folder)
    for committed in found.marks:
        forget_marks(store, committed)
    for name, size in found.temporaries.items():
        assert isinstance(store, LocalStore)
        (store.root / name).unlink(missing_ok=True)
        freed += size
    for upload in found.uploads:
        assert isinstance(store, ObjectStore)
        abort_upload(store, upload)
    return freed


def _temporaries(store: LocalStore, older_s: float) -> dict[str, int]:
    """Files that were never given their name, with their sizes, of writers that have not touched them for so long."""
    found, now = {}, time.time()
    for path, _, names in os.walk(store.root):
        for name in names:
            if name.startswith(TEMPORARY):
                file = os.path.join(path, name)
                try:
                    facts = os.stat(file)
                except FileNotFoundError:
                    continue  # its writer was not dead
                if now - facts.st_mtime >= older_s:
                    found[os.path.relpath(file, store.root)] = facts.st_size if facts.st_nlink == 1 else 0
    return dict(sorted(found.items()))


def _uploads(store: ObjectStore, older_s: float, notes: list[str]) -> list[Upload]:
    """Unfinished multipart uploads of such an age; a note where the store cannot be asked."""
    try:
        return [upload for upload in list_uploads(store) if time.time() - upload.began_s >= older_s]
    except StorageError as error:
        notes.append(
            f"unfinished uploads were not looked for: {error}; have the bucket abort incomplete multipart uploads "
            f"after a day (a lifecycle rule)"
        )
        return []
