"""Schedules are pure functions of the steps taken."""

import math
from itertools import pairwise

import pytest

from truestep.errors import UserError
from truestep.optim.schedule import factor
from truestep.recipe.stage import Schedule


def factors(total: int, **fields) -> list[float]:
    return [factor(Schedule(**fields), taken, total) for taken in range(total)]


def test_c23_resumed_run_goes_on_where_it_was():
    cosine = Schedule(kind="cosine", warmup=0, final=0)
    after_five = [factor(cosine, taken, 10) for taken in (5, 6, 7)]
    assert after_five == pytest.approx([0.5, 0.345492, 0.206107], abs=1e-6)


def test_c23_warm_up_counts_optimizer_steps_not_processes():
    # Nothing in the arguments could carry a number of processes: step 25 is the one after 24.
    assert factor(Schedule(kind="linear", warmup=100), 24, 1000) == 0.25


def test_c23_skipped_steps_do_not_move_the_schedule():
    taken = 0
    for attempt in range(10):
        if attempt not in (2, 3, 7):  # overflow
            taken += 1
    assert taken == 7
    assert factor(Schedule(kind="linear", warmup=0), taken, 10) == pytest.approx(0.3)


def test_warm_up_moves_from_the_first_step_and_reaches_the_peak():
    assert factors(20, kind="constant", warmup=4) == [0.25, 0.5, 0.75] + [1.0] * 17


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decaying_kinds_end_at_final(kind):
    schedule = Schedule(kind=kind, warmup=0.1, final=0.1)
    values = [factor(schedule, taken, 100) for taken in range(101)]
    assert values[9] == 1.0 and values[10] == 1.0 and values[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(values[10:]))


@pytest.mark.parametrize("shape, half", [("linear", 0.5), ("1-sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)])
def test_wsd_is_stable_then_decays(shape, half):
    schedule = Schedule(kind="wsd", warmup=10, decay=0.2, decay_shape=shape, final=0.1)
    values = [factor(schedule, taken, 100) for taken in range(101)]
    assert values[9:81] == [1.0] * 72
    assert values[90] == pytest.approx(0.1 + 0.9 * half) and values[100] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(values[80:]))


def test_fractions_and_numbers_of_steps_mean_the_same():
    assert factors(200, kind="wsd", warmup=0.05, decay=0.2) == factors(200, kind="wsd", warmup=10, decay=40)


def test_a_stage_of_one_step_has_a_rate():
    assert factors(1, kind="wsd") == [1.0]
    assert factors(1, kind="cosine", warmup=0) == [1.0]


def test_what_does_not_fit_is_one_sentence():
    with pytest.raises(UserError, match="more than the stage's 50") as error:
        factor(Schedule(warmup=40, decay=0.3), 0, 50)
    assert "warmup = 40" in str(error.value) and "decay = 0.3" in str(error.value)
