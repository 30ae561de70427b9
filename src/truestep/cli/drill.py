"""`truestep drill`: try the restore of a run's newest checkpoint."""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truestep.cli.arguments import Overrides

if TYPE_CHECKING:
    from truestep.stages.drill import Finding, Trial, Tried

RunDir = Annotated[Path, typer.Argument(help="the run's directory, <run.dir>/<run.name>", metavar="RUN")]
Stage = Annotated[str | None, typer.Option("--stage", help="by default the one that began last", metavar="NAME")]
Processes = Annotated[
    int,
    typer.Option("--processes", help="0: another number than the checkpoint was saved by", min=0, metavar="N"),
]
Steps = Annotated[
    int | None,
    typer.Option("--steps", help="to do again; by default checkpoint.drill_steps", min=0, metavar="K"),
]
Out = Annotated[Path | None, typer.Option("--json", help="also write what was found into this file", metavar="FILE")]
Background = Annotated[
    bool, typer.Option("--background", help="at the lowest priority, in half of the free memory at most, on CPUs")
]
Key = Annotated[str | None, typer.Option("--trial", hidden=True)]
SHARE_OF_MEMORY = 0.5


def drill(
    run: RunDir,
    stage: Stage = None,
    processes: Processes = 0,
    steps: Steps = None,
    set: Overrides = None,
    background: Background = False,
    out: Out = None,
    trial: Key = None,
) -> None:
    """Drill RUN's newest checkpoint: read every byte, load it on another number of processes, compare all state with
    what was in memory when it was saved, and do some steps again beside the log.

    One that is damaged is quarantined: the next restart picks the one before. What was found is marked beside the
    checkpoint and goes into the run's log. Exit code 0: sound. 1: not. 2: bad input, or nothing can be said.
    """
    overrides = set or []
    if trial is not None:
        assert stage is not None and steps is not None and out is not None
        _rank(run, stage, trial, processes, steps, overrides, out)
        return
    found = carry_out(run, stage, processes, steps, overrides, background)
    print(found.sentence)
    if out is not None:
        out.write_text(json.dumps(asdict(found) | {"sentence": found.sentence}, indent=1))
    if not found.ok:
        sys.exit(1)


def carry_out(
    run_dir: Path,
    stage: str | None = None,
    processes: int = 0,
    steps: int | None = None,
    overrides: list[str] | None = None,
    background: bool = False,
) -> "Finding":
    """Drill a run's newest checkpoint with processes of its own."""
    from truestep.elastic.lifeline import die_with_launcher
    from truestep.elastic.low_priority import free_memory_bytes, lower

    die_with_launcher()
    overrides, free_bytes, variables = list(overrides or []), float("inf"), dict[str, str]()
    if background:
        lower()
        free_bytes = SHARE_OF_MEMORY * free_memory_bytes()
        overrides.append("machine.device=cpu")
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def try_it(trial: "Trial") -> "Tried":
        return _try(run_dir, trial, overrides, variables)

    from truestep.stages.drill import drill as do

    return do(run_dir, try_it, stage=stage, processes=processes, steps=steps, free_bytes=free_bytes)


def _try(run_dir: Path, trial: "Trial", overrides: list[str], variables: dict[str, str]) -> "Tried":
    """By processes that are started for it."""
    from truestep.cli.verbs import WorkerFailed
    from truestep.elastic.side_job import run_together
    from truestep.stages.drill import Tried

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tried.json"
        arguments: list[Any] = ["drill", run_dir, "--stage", trial.stage, "--trial", trial.key, "--json", file]
        arguments += ["--processes", trial.processes, "--steps", trial.steps]
        arguments += [part for one in overrides for part in ("--set", one)]
        code = run_together([str(argument) for argument in arguments], trial.processes, variables)
        if code:
            raise WorkerFailed(code)
        return Tried(**json.loads(file.read_text()))


def _rank(run: Path, stage: str, key: str, processes: int, steps: int, overrides: list[str], out: Path) -> None:
    """One rank of a trial."""
    from truestep.elastic.lifeline import die_with_launcher
    from truestep.parallel.environment import place
    from truestep.stages.drill import Trial, try_restore

    here = place(os.environ)
    die_with_launcher()
    tried = try_restore(run, Trial(stage, key, processes, steps), overrides, here)
    if tried is not None:
        out.write_text(json.dumps(asdict(tried)))
