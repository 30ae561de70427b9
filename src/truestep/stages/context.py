"""What every stage of a run shares: the run directory, its log, the job, and where models lie."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.errors import RecipeError, StorageError, UserError
from truestep.parallel.job import Job
from truestep.recipe.digests import changed, what, what_fields
from truestep.recipe.load import dump
from truestep.recipe.recipe import Recipe
from truestep.runlog.log import RunLog, sync_folder
from truestep.stages.progress import TerminalProgress


@dataclass
class Context:
    """`log` is there on rank 0 only. `command` goes on with the run."""

    recipe: Recipe
    job: Job
    run_dir: Path
    attempt: int
    progress: TerminalProgress
    command: str
    log: RunLog | None = None

    def note(self, record: str, /, **fields: Any) -> None:
        if self.log:
            self.log.append(record, **fields)

    def model_dir(self, stage: str) -> Path:
        return self.run_dir / "models" / stage

    @property
    def data_dir(self) -> Path:
        """Token stores and tokenizers, named by content and shared by all runs of one folder."""
        return self.run_dir.parent / ".data"


def run_directory(recipe: Recipe) -> Path:
    return Path(recipe.run.dir).expanduser() / recipe.run.name


def open_run(recipe: Recipe) -> str:
    """Make the run directory, or check that it belongs to this recipe. Returns "new" or "again". Rank 0 only.

    Raises RecipeError naming the changed fields where the directory was made by another *what*.
    """
    directory = run_directory(recipe)
    file = directory / "run.json"
    if not file.exists():
        _create(directory, file, recipe)
        return "new"
    try:
        old = json.loads(file.read_bytes())
        differences = changed(old["what"], what_fields(recipe))
    except (ValueError, KeyError) as error:
        raise UserError(f"{file} is damaged ({error}); restore it, or choose another run.name") from None
    if differences:
        raise RecipeError(
            [
                f"{directory} belongs to another recipe: {'; '.join(differences)}; "
                f"choose another run.name, or put the old values back"
            ]
        )
    return "again"


def _create(directory: Path, file: Path, recipe: Recipe) -> None:
    body = {"format": 1, "what": what_fields(recipe), "digest": what(recipe), "recipe": dump(recipe)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(entry.name not in ("log",) for entry in directory.iterdir()):
            raise UserError(f"{directory} holds other files but no run.json; choose another run.name or empty the folder")
        temporary = file.with_suffix(".tmp")
        with temporary.open("w") as out:
            json.dump(body, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
        sync_folder(directory)
    except OSError as error:
        raise StorageError(
            f"the run directory {directory} cannot be written ({error.strerror}); free space, or choose another run.dir"
        ) from None
