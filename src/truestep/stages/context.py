"""What every stage of a run shares: the run directory, its log, the job, and where models lie."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from truestep.checkpoint.of_run import RUN_FILE
from truestep.errors import RecipeError, StorageError, UserError
from truestep.files import publish
from truestep.parallel.job import Job
from truestep.recipe.digests import changed, what, what_fields
from truestep.recipe.dump import mapping_of
from truestep.recipe.recipe import Recipe
from truestep.runlog.log import LogReader, RunLog
from truestep.runlog.metrics import RankMetrics
from truestep.stages.progress import TerminalProgress

SHOWN_DIFFERENCES = 6


@dataclass
class Context:
    """`log` is there on rank 0 only. `command` goes on with the run. `closing`: what is done when the attempt ends,
    however it ends."""

    recipe: Recipe
    job: Job
    run_dir: Path
    attempt: int
    progress: TerminalProgress
    command: str
    log: RunLog | None = None
    closing: ExitStack = field(default_factory=ExitStack)

    def note(self, record: str, /, **fields: Any) -> None:
        if self.log:
            self.log.append(record, **fields)

    def require_newest(self) -> None:
        """On rank 0: LogError once a newer attempt has begun."""
        if self.log:
            self.log.require_newest()

    @cached_property
    def metrics(self) -> RankMetrics:
        """This rank's shard metrics, one writer for all stages of the attempt."""
        return RankMetrics(self.run_dir, self.attempt, self.job.rank)

    def model_dir(self, stage: str) -> Path:
        return self.run_dir / "models" / stage

    @property
    def data_dir(self) -> Path:
        """Token stores and tokenizers, named by content and shared by all runs of one folder."""
        return self.run_dir.parent / ".data"


def open_run(recipe: Recipe) -> None:
    """Make the run directory, or check that it belongs to this recipe. Rank 0 only.

    Raises RecipeError naming the changed fields where the directory was made by another *what* and something was
    trained; what failed before that may be corrected in the recipe.
    """
    directory = recipe.directory
    if not (directory / RUN_FILE).exists():
        return _create(directory, recipe)
    differences = _differences(directory, recipe)
    if differences and _trained(directory):
        shown = differences[:SHOWN_DIFFERENCES]
        more = len(differences) - len(shown)
        sentence = (
            f"{directory} belongs to another recipe: {'; '.join(shown)}{f'; and {more} more' if more else ''}; "
            f"choose another run.name, or put the old values back"
        )
        raise RecipeError([sentence])


def adopt(recipe: Recipe) -> None:
    """Let the run directory belong to this recipe, if it does not yet. The caller holds the run's log."""
    directory = recipe.directory
    if _differences(directory, recipe):
        with _writing(directory):
            _write(directory, recipe)


def _differences(directory: Path, recipe: Recipe) -> list[str]:
    file = directory / RUN_FILE
    try:
        return changed(json.loads(file.read_bytes())["what"], what_fields(recipe))
    except (ValueError, KeyError) as error:
        raise UserError(f"{file} is damaged ({error}); restore it, or choose another run.name") from None


def _trained(directory: Path) -> bool:
    """Whether a stage was begun: before that, a run has only built data, which is named by its content."""
    return (directory / "log").is_dir() and any(r.kind == "stage_start" for r in LogReader(directory).records())


def _create(directory: Path, recipe: Recipe) -> None:
    """Make the directory and its run.json, or leave nothing."""
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    with _writing(directory):
        if directory.is_dir() and any(entry.name != "log" for entry in directory.iterdir()):
            raise UserError(
                f"{directory} holds other files but no {RUN_FILE}; choose another run.name or empty the folder"
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _write(directory, recipe)
        except OSError:
            for path in filter(Path.is_dir, made):
                path.rmdir()
            raise


def _write(directory: Path, recipe: Recipe) -> None:
    body = {"format": 1, "what": what_fields(recipe), "digest": what(recipe), "mapping": mapping_of(recipe)}
    publish(directory / RUN_FILE, json.dumps(body, indent=1).encode())


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the run directory {directory} cannot be written ({error.strerror}); "
            f"free space, permit writing there, or choose another run.dir"
        ) from None
