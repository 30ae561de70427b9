"""`truestep chaos`: carry out a recipe while things break, and say what became of each fault."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from truestep.cli.arguments import Overrides, RecipePath

Plan = Annotated[Path, typer.Option("--plan", help="what breaks, where and when: a TOML file", metavar="PLAN")]
Out = Annotated[
    Path | None, typer.Option("--out", help="where to write the page; by default RUN/chaos.html", metavar="FILE")
]


def chaos(recipe: RecipePath, plan: Plan, out: Out = None, set: Overrides = None) -> None:
    """Carry out RECIPE under the faults of PLAN: processes are killed, stopped and slowed, bits flip in memory and in
    checkpoints, files cannot grow, machines are cut off.

    Exit code 0 if every fault was noticed, located and survived as the plan expects and the run ended well.
    """
    from rich.console import Console

    from truestep.dashboard.chaos import summary, table, write_page
    from truestep.elastic.chaos import Storm
    from truestep.errors import UserError
    from truestep.ledger.outcomes import outcomes
    from truestep.recipe.chaos import load_plan
    from truestep.recipe.load import load
    from truestep.runlog.log import read

    overrides = [part for value in set or [] for part in ("--set", value)]
    faults, resolved = load_plan(plan), load(recipe, set or [])
    storm = Storm(resolved, ["run", recipe, *overrides], faults, say=lambda text: print(f"chaos: {text}", flush=True))
    if (storm.run_dir / "run.json").exists():
        raise UserError(
            f"{storm.run_dir} holds a run already, and this one is to be damaged; "
            f"give it a name of its own: --set run.name={resolved.run.name}-chaos"
        )
    ended = storm.carry_out()
    if not (storm.run_dir / "log").is_dir():
        raise UserError(f"the run ended with exit code {ended.code} before it had begun; what it said stands above")
    records = list(read(storm.run_dir))
    found = outcomes(ended.injections, records, resolved.machine.hang_s)
    words = "ended by the plan's deadline" if ended.late else f"the run ended with exit code {ended.code}"
    page = write_page(out or storm.run_dir / "chaos.html", resolved.run.name, found, records, words)
    console = Console(highlight=False)
    console.print(table(found))
    console.print(f"\n{summary(found)}; {words}; the page: {page}")
    if ended.late or ended.code not in (0, 1) or any(one.verdict != "as expected" for one in found):
        sys.exit(1)
