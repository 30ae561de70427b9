"""R(k): which rows each step reads, against a loop that counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recipe.small import small
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.load import load
from truestep.recipe.stage import RampPoint


def _counted(tokens: int, context: int, batch_tokens: int, ramp: tuple[RampPoint, ...]) -> list[tuple[int, int]]:
    rows, done = [], 0
    while done * context < tokens:
        size = batch_tokens
        for point in ramp:
            if done * context >= point.after:
                size = point.batch_tokens
        rows.append((done, done + size // context))
        done += size // context
    return rows


@given(st.data())
def test_rows_are_those_of_a_loop_that_counts(data):
    context = data.draw(st.integers(1, 8))
    sizes = st.integers(1, 9).map(lambda rows: rows * context)
    tokens = data.draw(st.integers(1, 2000))
    afters = sorted(data.draw(st.sets(st.integers(1, 2500), max_size=4)))
    ramp = tuple(RampPoint(after=after, batch_tokens=data.draw(sizes)) for after in afters)
    batch_tokens = data.draw(sizes)
    schedule = BatchSchedule(tokens, context, batch_tokens, ramp)
    expected = _counted(tokens, context, batch_tokens, ramp)
    assert [schedule.rows(step) for step in range(schedule.steps)] == expected
    assert [schedule.rows_in(step) for step in range(schedule.steps)] == [stop - start for start, stop in expected]
    assert schedule.total_rows == expected[-1][1]


def test_a_stage_is_rounded_up_to_whole_steps():
    stage = load(small()).stages[0]
    schedule = BatchSchedule.of(stage)
    assert (schedule.steps, schedule.total_rows, schedule.rows(0), schedule.rows(122)) == (
        123,
        7872,
        (0, 64),
        (7808, 7872),
    )


def test_a_long_stage_costs_nothing():
    schedule = BatchSchedule(10**14, 4096, 4096 * 1024, (RampPoint(after=10**12, batch_tokens=4096 * 4096),))
    assert schedule.rows(schedule.steps - 1)[1] == schedule.total_rows and schedule.total_rows * 4096 >= 10**14


@pytest.mark.parametrize("step", [-1, 123])
def test_steps_outside_the_stage_are_refused(step):
    with pytest.raises(IndexError, match="is not one of the 123 steps"):
        BatchSchedule.of(load(small()).stages[0]).rows(step)
