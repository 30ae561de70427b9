"""`truestep run`: carry out a recipe, or go on with it."""

import sys

from truestep.cli import verbs
from truestep.cli.arguments import Overrides, RecipePath


def run(recipe: RecipePath, set: Overrides = None) -> None:
    """Carry out RECIPE: data, training, evaluation, gate, model, card. The same command goes on where a run stopped.

    Ctrl-C once ends after the step with a checkpoint; twice ends at once. Under torchrun or srun it joins that job.
    """
    outcome = verbs.run(recipe, set or [])
    if outcome.exit_code:
        sys.exit(outcome.exit_code)
