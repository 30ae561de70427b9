"""The verbs as Python functions, usable from a script or a notebook: `truestep.run(recipe)` and friends.

Every one takes a recipe as a path, as a mapping, or as a Recipe, with overrides as on the command line; bad input
raises UserError. Torch is imported only by what trains or generates.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truestep.elastic.attempt import how
from truestep.elastic.devices import ranks_here, visible_gpus
from truestep.elastic.lifeline import die_with_launcher
from truestep.elastic.supervise import supervise
from truestep.errors import UserError
from truestep.parallel.environment import place
from truestep.recipe.dump import dump
from truestep.recipe.elastic import Elastic
from truestep.recipe.load import load
from truestep.recipe.recipe import Recipe

if TYPE_CHECKING:
    from truestep.cli.again import Replayed
    from truestep.dashboard.status import Status
    from truestep.rollout.chat import Chat
    from truestep.stages.drill import Finding
    from truestep.stages.replay import Outcome

RecipeLike = Recipe | Mapping[str, Any] | str | os.PathLike[str]


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
    """Carry out a recipe, or go on with it where it was interrupted. Starts and supervises `machine.processes` ranks,
    or joins the job of torchrun or srun. Writes report.html into the run's directory."""
    resolved = load(recipe, list(overrides))
    here = place(os.environ)
    die_with_launcher()
    command = os.environ.get("TRUESTEP_COMMAND") or _command(recipe)
    ranks = ranks_here(resolved.machine.processes, resolved.machine.device, visible_gpus(os.environ))
    if here is None and ranks < resolved.machine.processes:
        print(f"machine.processes is {resolved.machine.processes}, this machine has GPUs: {ranks}; one process a GPU")
    if here is None and (ranks > 1 or resolved.machine.elastic != Elastic()):
        _supervise(resolved, command, ranks)
    else:
        from truestep.stages.run import carry_out

        carry_out(resolved, here, command)
    if here is None or (here.rank == 0 and here.launcher != "truestep"):  # once a job, by who started it
        print(f"plots and ledger: {report(resolved.directory)}")
    return _outcome(resolved)


def check(recipe: RecipeLike, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe, if it is sound; else a RecipeError with every problem."""
    return load(recipe, list(overrides))


def show(recipe: RecipeLike, overrides: Sequence[str] = ()) -> str:
    """The resolved recipe as TOML with types in comments; it can be run again."""
    return dump(load(recipe, list(overrides)))


def replay(
    run_dir: str | os.PathLike[str],
    first: int,
    last: int,
    *,
    stage: str | None = None,
    processes: int = 0,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    say: Callable[["Outcome"], None] | None = None,
) -> "Replayed | None":
    """Do steps [first, last] of a run again and compare every bit with its log; what came of it, None on ranks of a job
    other than the first. `say` is told more where it is found, `out` is a file for that as JSON."""
    from truestep.cli.again import replay as do

    return do(Path(run_dir), first, last, stage, processes, list(overrides), out, say)


def drill(run_dir: str | os.PathLike[str], **options: Any) -> "Finding":
    """Try the restore of a run's newest checkpoint, mark it, and leave what was found for the log. Options: stage,
    processes, steps, overrides, background (lowers the priority of this very process)."""
    from truestep.cli.drill import carry_out

    return carry_out(Path(run_dir), **options)


def status(run_dir: str | os.PathLike[str]) -> "Status":
    """Where a run stands."""
    from truestep.dashboard.status import status as look

    return look(Path(run_dir))


def report(run_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write one self-contained HTML page about a run and return its path."""
    from truestep.dashboard.report import write_report

    return write_report(Path(run_dir), Path(out) if out else Path(run_dir) / "report.html")


def build_data(recipe: RecipeLike, overrides: Sequence[str] = ()) -> dict[str, Path]:
    """Build the token stores of all data sections, as `run` would; the folder of each by name."""
    from truestep.stages.corpora import build_all

    return build_all(load(recipe, list(overrides)))


def export(source: str | os.PathLike[str], target: str | os.PathLike[str], **options: Any) -> Path:
    """Write a model directory, a hub model, or the newest checkpoint of a run as a new Hugging Face directory. Options
    are those of `truestep export`: dtype, shard_size, stage, module, like, cache."""
    from truestep.cli.export import export as write

    write(str(source), Path(target), **options)
    return Path(target)


def sample(model: str | os.PathLike[str], prompts: Sequence[str], **options: Any) -> list[str]:
    """Completions of prompts by a model directory. Options: max_new_tokens, temperature, top_p, seed, adapter, device,
    own_module."""
    from truestep.rollout.directory import sample_from

    return sample_from(Path(model), prompts, **options)


def chat(model: str | os.PathLike[str], system: str | None = None, **options: Any) -> "Chat":
    """A conversation with a model directory: `.say(message)` answers, `.stream(message)` does so piece by piece.
    Options: max_new_tokens, temperature, top_p, seed, adapter, device, own_module."""
    from truestep.rollout.chat import open_chat

    return open_chat(Path(model), system, **options)


def _outcome(recipe: Recipe) -> RunOutcome:
    directory = recipe.directory
    models = {stage.name: directory / "models" / stage.name for stage in recipe.stages}
    reason = status(directory).reason
    if reason is None:
        raise UserError(f"{directory}: the attempt ended without a word; see its log, and run the same command again")
    return RunOutcome(directory, reason, {name: path for name, path in models.items() if path.is_dir()})


def _command(recipe: RecipeLike) -> str:
    """What a person types to go on."""
    if Path(sys.argv[0]).name in ("truestep", "__main__.py"):
        return " ".join(["truestep", *sys.argv[1:]])
    return f"truestep run {recipe}" if isinstance(recipe, str | os.PathLike) else "truestep.run(...) again"


def _supervise(recipe: Recipe, command: str, ranks: int) -> None:
    """Start the ranks with the resolved recipe, in a file beside the run's directory for as long as they run."""
    directory = recipe.directory
    folder = directory.parent
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = folder / f".{directory.name}.recipe.toml"
    variables = {"TRUESTEP_COMMAND": command, "TRUESTEP_LAUNCHED": str(time.time())}
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(dump(recipe))
        except OSError as error:
            raise UserError(
                f"run.dir {str(folder)!r} cannot be written ({error.strerror}); choose another folder"
            ) from None
        outcome = supervise(recipe, file, ranks, visible_gpus(os.environ), variables)
    finally:
        if file.is_file():
            file.unlink()
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
    if outcome.code not in (0, 1):
        raise WorkerFailed(outcome.code, outcome.sentence)


class WorkerFailed(UserError):
    """A rank ended with `code` and has said why itself; `sentence`: what the supervisor has to say."""

    def __init__(self, code: int, sentence: str = ""):
        self.code = code
        sentence = sentence or f"a rank {how(code)}; what it said stands above"
        super().__init__(f"{sentence}; the same command goes on from the newest checkpoint")
