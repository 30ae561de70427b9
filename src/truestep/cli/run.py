"""`truestep run`: carry out a recipe, or go on with it."""

import sys
from typing import Annotated

import typer

from truestep.cli import verbs

Recipe = Annotated[str, typer.Argument(help="the recipe, a TOML file", metavar="RECIPE")]
Set = Annotated[list[str] | None, typer.Option("--set", help="override a field, stages by name: stages.base.optim.lr=3e-4", metavar="PATH=VALUE")]


def run(recipe: Recipe, set: Set = None) -> None:
    """Carry out RECIPE: data, training, evaluation, gate, model, card. The same command goes on with an interrupted run.

    Ctrl-C once ends after the current step with a checkpoint; twice ends at once. Under torchrun or srun it joins that job.
    """
    outcome = verbs.run(recipe, set or [])
    if outcome.exit_code:
        sys.exit(outcome.exit_code)
