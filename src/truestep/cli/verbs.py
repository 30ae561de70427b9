"""The verbs as Python functions, usable from a script or a notebook: `truestep.run(recipe)` and friends.

Torch is imported only by what trains.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.elastic.launch import launch
from truestep.errors import UserError
from truestep.parallel.environment import place
from truestep.recipe.load import dump, load
from truestep.recipe.recipe import Recipe

RecipeLike = Recipe | Mapping[str, Any] | str | os.PathLike


@dataclass(frozen=True)
class RunOutcome:
    """Where a run lies and how it ended: "finished", "stopped" (politely; the same call goes on), or "gate" (a stage's
    gate did not pass). `models` maps stages to their model directories."""

    directory: Path
    reason: str
    models: dict[str, Path]

    @property
    def exit_code(self) -> int:
        return 1 if self.reason == "gate" else 0


def run(recipe: RecipeLike, overrides: Sequence[str] = ()) -> RunOutcome:
    """Carry out a recipe (a path, TOML text's mapping, or a Recipe), or go on with it where it was interrupted.

    Starts `machine.processes` ranks, or joins the job of torchrun or srun. Raises UserError for bad input.
    """
    resolved = load(recipe, list(overrides))
    here = place(os.environ)
    if here is None and resolved.machine.processes > 1:
        _launch(resolved)
    else:
        from truestep.stages.run import carry_out

        shown = f"truestep run {recipe}" if isinstance(recipe, str | os.PathLike) else "truestep.run(...)"
        carry_out(resolved, here, os.environ.get("TRUESTEP_COMMAND", shown))
    return outcome(resolved)


def outcome(recipe: Recipe) -> RunOutcome:
    """How the newest attempt of a recipe's run ended, from its run log."""
    from truestep.dashboard.status import status

    directory = Path(recipe.run.dir).expanduser() / recipe.run.name
    now = status(directory)
    models = {stage.name: directory / "models" / stage.name for stage in recipe.stages}
    return RunOutcome(directory, now.reason or "unknown", {name: path for name, path in models.items() if path.is_dir()})


def _launch(recipe: Recipe) -> None:
    directory = Path(recipe.run.dir).expanduser() / recipe.run.name
    resolved = directory.parent / f".{directory.name}.recipe.toml"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        resolved.write_text(dump(recipe))
    except OSError as error:
        raise UserError(f"run.dir {recipe.run.dir!r} cannot be written ({error.strerror}); choose another folder") from None
    os.environ.setdefault("TRUESTEP_COMMAND", " ".join(["truestep", *sys.argv[1:]]))
    code = launch([sys.executable, "-m", "truestep", "run", str(resolved)], recipe.machine.processes)
    if code not in (0, 1):
        # The worker that failed has said why.
        sys.exit(code if code > 0 else 128 - code)
