"""How many tokens so many epochs are."""

import pytest

from truestep.errors import RecipeError
from truestep.recipe.batch_schedule import BatchSchedule, step_rows
from truestep.recipe.data import MixtureItem
from truestep.recipe.posttrain import Remember
from truestep.recipe.stage import Optim, RampPoint, Schedule, Stage
from truestep.stages.epochs import in_tokens

STILL = Optim(schedule=Schedule(kind="constant", warmup=0))


def stage(**changes) -> Stage:
    given = {"name": "s", "kind": "sft", "start": "x", "data": "d", "context": 16, "batch_tokens": 64, "optim": STILL}
    return Stage(**(given | changes))


@pytest.mark.parametrize("epochs, rows, tokens", [(1, 7, 7 * 16), (2, 7, 14 * 16), (0.1, 30, 3 * 16), (0.5, 7, 4 * 16)])
def test_tokens_are_the_places_of_so_many_passes(epochs: float, rows: int, tokens: int):
    found = in_tokens(stage(epochs=epochs), [rows])
    assert found.tokens == tokens and BatchSchedule.of(found).steps == -(-tokens // 64)


def test_a_stage_that_tells_tokens_stays_as_it_is():
    given = stage(tokens=640)
    assert in_tokens(given, [7]) is given


def test_passes_are_over_all_corpora_of_the_stage_and_replay_comes_on_top():
    data = [MixtureItem(data="a", weight=3.0), MixtureItem(data="b", weight=1.0)]
    assert in_tokens(stage(data=data, epochs=2), [10, 20]).tokens == 60 * 16
    remember = Remember(replay=[MixtureItem(data="old", weight=1.0)])
    assert in_tokens(stage(data=data, epochs=2, remember=remember), [10, 20, 500]).tokens == 75 * 16


def test_a_warm_up_that_is_longer_than_the_epochs_is_refused():
    long = Optim(schedule=Schedule(kind="cosine", warmup=5))
    with pytest.raises(
        RecipeError, match=r"optim.schedule has warmup 5, more than the 4 .*2 epochs of 7 rows are 4 steps"
    ):
        in_tokens(stage(epochs=2, optim=long), [7])


def test_rows_of_steps_are_known_before_the_data_is():
    ramp = [RampPoint(after=100, batch_tokens=128), RampPoint(after=10**6, batch_tokens=256)]
    assert step_rows(stage(epochs=2, ramp=ramp)) == (4, 16)
    assert step_rows(stage(tokens=640, ramp=ramp)) == (4, 8)
