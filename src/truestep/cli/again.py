"""Steps of a run done again, here or by processes started for it: what `truestep replay` and `truestep drill` share."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truestep.cli.verbs import WorkerFailed
from truestep.elastic.lifeline import die_with_launcher
from truestep.elastic.side_job import run_together
from truestep.parallel.environment import place

if TYPE_CHECKING:
    from truestep.stages.replay import Outcome


@dataclass(frozen=True)
class Replayed:
    """What a replay came to: the command's exit code, the sentence, and all of it as JSON."""

    code: int
    sentence: str
    details: dict[str, Any]


def replay(
    run_dir: Path,
    first: int,
    last: int,
    stage: str | None,
    processes: int,
    overrides: Sequence[str],
    out: Path | None,
    say: Callable[["Outcome"], None] | None,
) -> Replayed | None:
    """See truestep.cli.verbs.replay."""
    from truestep.stages.replay import carry_out, plan_replay

    here = place(os.environ)
    die_with_launcher()
    plan = plan_replay(run_dir, first, last, stage, processes, overrides)
    ranks = plan.recipe.machine.processes
    if here is None and ranks > 1:
        arguments = ["replay", str(run_dir), "--steps", f"{first}:{last}", "--stage", plan.stage]
        arguments += ["--processes", str(ranks), *(part for one in overrides for part in ("--set", one))]
        details = _by_others(arguments, ranks, out)
    else:
        outcome = carry_out(run_dir, plan, here)
        if outcome is None:
            return None
        if say is not None:
            say(outcome)
        details = outcome.to_json()
        if out is not None:
            out.write_text(json.dumps(details, indent=1))
    return Replayed(details["code"], details["sentence"], details)


def _by_others(arguments: list[str], ranks: int, out: Path | None) -> dict[str, Any]:
    """Processes that are started for it, of which the first writes what was found into a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = out or Path(folder) / "outcome.json"
        code = run_together([*arguments, "--json", str(file)], ranks, {})
        if code not in (0, 1, 3):
            raise WorkerFailed(code)
        return json.loads(file.read_text())
