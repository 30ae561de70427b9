"""`truestep replay`: do steps of a run again, and compare every bit with its log."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from truestep.cli.arguments import Overrides

if TYPE_CHECKING:
    from truestep.stages.replay import Outcome

RunDir = Annotated[Path, typer.Argument(help="the run's directory, <run.dir>/<run.name>", metavar="RUN")]
Steps = Annotated[str, typer.Option("--steps", help="first and last step, as numbered in the log", metavar="A:B")]
Stage = Annotated[str | None, typer.Option("--stage", help="by default the one that began last", metavar="NAME")]
Processes = Annotated[
    int, typer.Option("--processes", help="0: the fewest that give the same bits (exact: tp x cp)", min=0, metavar="N")
]
Out = Annotated[Path | None, typer.Option("--json", help="also write the outcome into this file", metavar="FILE")]


def replay(
    run: RunDir, steps: Steps, stage: Stage = None, processes: Processes = 0, set: Overrides = None, out: Out = None
) -> None:
    """Do steps A to B of RUN again, from the newest sound checkpoint before them, and compare loss, gradient norm,
    every microbatch and the logged digests bit for bit. RUN is only read.

    Exit code 0: every bit equal. 1: they part, and it says where. 2: bad input. 3: not comparable, since what the last
    bits depend on is otherwise here.
    """
    from truestep.cli.verbs import replay as do

    first, last = steps_of(steps)
    found = do(run, first, last, stage=stage, processes=processes, overrides=set or [], out=out, say=show)
    if found is not None and found.code:
        sys.exit(found.code)


def steps_of(text: str) -> tuple[int, int]:
    """A:B, or one number."""
    from truestep.errors import UserError

    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        raise UserError(f"--steps {text!r} is not of the form A:B; write, for example, --steps 11:20")
    return int(match[1]), int(match[2] or match[1])


def show(outcome: "Outcome") -> None:
    """A table of the steps, and the sentence."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for note in outcome.notes:
        console.print(note, markup=False, style="yellow")
    begun = f"the checkpoint of step {outcome.from_step} ({outcome.commit})" if outcome.commit else "first weights"
    where = "1 process" if outcome.processes == 1 else f"{outcome.processes} processes"
    console.print(f"{outcome.stage}: steps done again from {begun}, on {where}")
    table = Table("step", "loss", "microbatches", "gradient", "state", "")
    for one in outcome.compared:
        digests = ["equal" if kind in one.digests and not one.parting else "-" for kind in ("gradient", "state")]
        verdict = "[red]parts[/red]" if one.parting else "[green]equal[/green]"
        table.add_row(str(one.step), f"{one.loss:.6f}", str(one.microbatches), *digests, verdict)
    console.print(table)
    console.print(outcome.sentence, markup=False)
