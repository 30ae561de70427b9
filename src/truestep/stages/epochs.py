"""How long a stage is that counts in passes over its data: known once the data is built and put into rows."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from truestep.errors import RecipeError
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.checks import schedule_problems
from truestep.recipe.stage import Stage
from truestep.stages.corpora import mixture


def in_tokens(stage: Stage, rows: Sequence[int]) -> Stage:
    """The stage with `tokens` set where it tells `epochs`; `rows`: of one pass over each of its corpora, those of
    stage.data first. Passes are over these together: with weights, one corpus may be seen more often and another less.
    What is mixed in from earlier stages comes on top.

    RecipeError where its schedule does not fit into so many steps."""
    if not stage.epochs:
        return stage
    own = [Fraction(str(item.weight)) for item in mixture(stage)]
    replayed = [Fraction(str(item.weight)) for item in stage.remember.replay]
    share = sum(own) / sum([*own, *replayed])
    wanted = ceil(Fraction(str(stage.epochs)) * sum(rows[: len(own)]) / share)
    found = stage.model_copy(update={"tokens": wanted * stage.context})
    problems = list(schedule_problems(found, f"stages.{stage.name}"))
    if problems:
        steps = BatchSchedule.of(found).steps
        says = f"{stage.epochs:g} epochs of {sum(rows):,} rows are {steps:,} steps"
        raise RecipeError([f"{one.path} {one.text} ({says})" for one in problems])
    return found
