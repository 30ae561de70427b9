"""The checkpoints of a run directory, seen from outside the run. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.checkpoint.catalogue import read_catalogue, read_commit
from truestep.checkpoint.marks import Standing, marks_of, standing
from truestep.checkpoint.sealed import Committed
from truestep.errors import CheckpointError, UserError
from truestep.recipe.load import load
from truestep.recipe.recipe import Recipe
from truestep.runlog.log import LogReader
from truestep.runlog.records import AttemptStart, Decision, Record, Resume, Save
from truestep.storage.interface import Store
from truestep.storage.local import LocalStore
from truestep.storage.store import open_store

RUN_FILE = "run.json"


def checkpoint_place(recipe: Recipe, run_dir: Path, stage: str) -> str:
    """Folder or URL of a stage's checkpoints."""
    url = recipe.checkpoint.url
    return f"{url.rstrip('/')}/{recipe.run.name}/{stage}" if url else str(run_dir / "checkpoints" / stage)


def disk_place(recipe: Recipe, stage: str) -> Path | None:
    """Folder of the copies of a stage's checkpoints on a disk of each host, if there is one."""
    disk = recipe.checkpoint.disk
    return Path(disk).expanduser() / recipe.run.name / stage if disk else None


def recorded_mapping(run_dir: Path) -> dict[str, Any]:
    """The recipe that a run directory was made with."""
    file = run_dir / RUN_FILE
    try:
        return json.loads(file.read_bytes())["mapping"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file} cannot be read ({error}); give the directory of a run") from None


@dataclass(frozen=True)
class Listed:
    """A checkpoint as `truestep checkpoints list` shows it. `saved_s`: Unix time of its save, if the log has it."""

    committed: Committed
    standing: Standing
    num_bytes: int
    saved_s: float | None
    places: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageStore:
    """A stage's checkpoints: the recipe that they belong to, their store, and what the run's log says."""

    recipe: Recipe
    stage: str
    store: Store
    records: tuple[Record, ...]

    def listed(self) -> list[Listed]:
        """Every checkpoint that counts, oldest first."""
        sizes: dict[str, int] = {}
        for entry in self.store.list("steps"):
            folder = entry.key.rpartition("/")[0]
            sizes[folder] = sizes.get(folder, 0) + entry.size
        marks, catalogue = marks_of(self.store), read_catalogue(self.store)
        return [self._listed(c, standing(marks.get(c, [])), sizes) for c in catalogue.commits]

    def lost(self) -> list[Committed]:
        """Checkpoints that are missing and were not deleted by retention."""
        return read_catalogue(self.store).lost

    def in_use(self) -> set[str]:
        """Keys of the commits that the newest attempt went on from."""
        found: set[str] = set()
        back = set()
        for record in self.records:
            data = record.data
            if isinstance(data, AttemptStart):
                found, back = set(), set()
            elif isinstance(data, Resume) and data.stage == self.stage:
                found.add(data.checkpoint)
            elif isinstance(data, Decision) and data.stage == self.stage and data.to_step is not None:
                back.add(data.to_step)
        return found | {c.key for c in read_catalogue(self.store).commits if c.step in back}

    def find(self, step: int) -> Committed:
        """The checkpoint of a step; of several, that of the newest epoch."""
        commits = read_catalogue(self.store).commits
        found = [c for c in commits if c.step == step]
        if not found:
            steps = ", ".join(str(c.step) for c in commits) or "none"
            raise UserError(f"{self.store.url}: stage {self.stage!r} has no checkpoint of step {step}; it has: {steps}")
        return found[-1]

    def _listed(self, committed: Committed, its: Standing, sizes: Mapping[str, int]) -> Listed:
        try:
            record = read_commit(self.store, committed)
        except CheckpointError as error:
            return Listed(committed, its, 0, None, ("store",), (*its.notes, str(error)))
        folder = record.manifest.rpartition("/")[0]
        saves = (r for r in self.records if isinstance(r.data, Save) and r.data.manifest == record.sha256)
        saved_s = next((r.time_s for r in saves), None)
        disk = disk_place(self.recipe, self.stage)
        near = ("disk",) if disk and LocalStore(disk).list(folder) else ()
        return Listed(committed, its, sizes.get(folder, 0), saved_s, (*near, "store"), its.notes)


def stage_stores(run_dir: Path, stage: str | None = None) -> list[StageStore]:
    """The stores of all stages of a run that have begun, or of one; UserError if there is no such stage."""
    recipe = load(recorded_mapping(run_dir))
    names = [each.name for each in recipe.stages]
    if stage not in (None, *names):
        raise UserError(f"{run_dir} has no stage {stage!r}; its stages: {', '.join(names)}")
    records = tuple(LogReader(run_dir).records()) if (run_dir / "log").is_dir() else ()
    found = []
    for name in [stage] if stage else names:
        store = open_store(checkpoint_place(recipe, run_dir, name), recipe.checkpoint.storage_options)
        if store.list("epochs"):
            found.append(StageStore(recipe, name, store, records))
    if not found:
        raise UserError(f"{run_dir} has no checkpoints yet; wait for its first one")
    return found
