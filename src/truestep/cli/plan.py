"""`truestep plan`: what a step of a recipe will cost on a mesh, before anything starts."""

from typing import Annotated

import typer

from truestep.cli.arguments import Overrides, RecipePath
from truestep.errors import UserError

DryRun = Annotated[bool, typer.Option("--dry-run", help="trace a step of a rank on tensors without memory")]
World = Annotated[
    int | None, typer.Option("--world", help="processes of the job; by default as the recipe tells", min=1, max=2**24)
]
Ranks = Annotated[
    list[int] | None,
    typer.Option(
        "--rank",
        help="with --dry-run: a rank to trace, may be repeated; by default the first of each pipeline stage "
        "that may need most memory",
        min=0,
    ),
]
StageName = Annotated[str | None, typer.Option("--stage", help="which stage of the recipe; by default the first")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def plan(
    recipe: RecipePath,
    dry_run: DryRun = False,
    world: World = None,
    rank: Ranks = None,
    stage: StageName = None,
    as_json: Json = False,
    set: Overrides = None,
) -> None:
    """Say what a step of RECIPE costs each rank of a job of any size: memory, collectives and FLOPs. Nothing is
    allocated and no network is used.

    Without --dry-run by formulas, at once and without torch; with it by a trace of the code that trains.
    """
    if dry_run:
        from truestep.cli.plan_dry_run import dry_run as trace

        trace(recipe, set or [], world, rank or [], stage, as_json)
    elif rank:
        raise UserError("--rank says which ranks to trace; give --dry-run as well.")
    else:
        from truestep.cli.mesh_cost import show

        show(recipe, set or [], world, stage, as_json)
