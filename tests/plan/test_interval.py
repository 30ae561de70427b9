"""The interval between checkpoints: published figures, Daly's own model, and what a run's log teaches."""

from math import exp, expm1

import pytest
from hypothesis import given
from hypothesis import strategies as st

import truestep
from tests import small_run
from tests.runlog.made_up import Clock, MadeUpRun
from truestep.plan import interval as plan
from truestep.plan.interval import FIRST_S, LEAST_S, MOST_S, PRIOR_DEVICE_S, FailureRate, Interval, daly, young
from truestep.runlog.log import read
from truestep.runlog.records import Note, Save

HOUR = 3600.0
TABLE = {
    7.9 * HOUR: {0.5: (169, 0.6), 6.3: (599, 2.1), 60: (1847, 6.5), 148.8: (2909, 10.2)},
    3 * HOUR: {0.5: (104, 1.0), 6.3: (369, 3.4), 60: (1138, 10.5), 148.8: (1793, 16.6)},
    1.8 * HOUR: {0.5: (80, 1.2), 6.3: (286, 4.4), 60: (882, 13.6), 148.8: (1389, 21.4)},
    14 * 60: {0.5: (29, 3.5), 6.3: (103, 12.2), 60: (317, 37.8), 148.8: (500, 59.5)},
}
"""MTBF of runs that were published -> stall of a save -> (interval in s, overhead in %)."""
CASES = [(mtbf, stall, *want) for mtbf, row in TABLE.items() for stall, want in row.items()]


@pytest.mark.parametrize("mtbf_s, stall_s, interval_s, percent", CASES)
def test_youngs_interval_and_overhead(mtbf_s, stall_s, interval_s, percent):
    found = young(stall_s, mtbf_s)
    assert found == pytest.approx(interval_s, abs=0.51)
    assert 100 * (stall_s / found + found / (2 * mtbf_s)) == pytest.approx(percent, abs=0.051)


def loss(period_s: float, stall_s: float, mtbf_s: float) -> float:
    """Daly's expected time per second of work, without restarts: M (e^(period/M) - 1) / (period - C)."""
    return mtbf_s * expm1(period_s / mtbf_s) / (period_s - stall_s)


@pytest.mark.parametrize("mtbf_s, stall_s, interval_s, percent", CASES)
def test_dalys_interval_is_the_best_of_his_model(mtbf_s, stall_s, interval_s, percent):
    best = min(loss(stall_s + 10 * interval_s * i / 20000, stall_s, mtbf_s) for i in range(1, 20000))
    mine = loss(daly(stall_s, mtbf_s), stall_s, mtbf_s)
    assert best <= mine * (1 + 1e-7) and mine == pytest.approx(best, rel=5e-4)
    if stall_s > 0.05 * mtbf_s:
        assert mine < loss(young(stall_s, mtbf_s), stall_s, mtbf_s)


def test_where_a_save_takes_longer_than_runs_live():
    assert daly(200, 100) == 300 and daly(500, 100) == 600
    assert daly(199.999, 100) == pytest.approx(200 * (1 + 1 / 3 + 1 / 9), rel=1e-4)  # what Daly's series gives there


def test_prior_is_the_published_rate():
    hours = PRIOR_DEVICE_S / HOUR
    assert hours == pytest.approx(50_677, rel=1e-4)
    assert hours / 16_384 == pytest.approx(3.09, abs=0.01)  # "one in about three hours"
    after_a_year = FailureRate(0, 1000 * 365 * 86400.0)
    assert after_a_year.mean() < 2 / PRIOR_DEVICE_S


def test_a_run_that_fails_every_minute_is_believed_soon():
    """Four devices, a failure each 60 s."""
    seen = [1 / (4 * FailureRate(n, 240.0 * n).mean()) for n in range(1, 11)]
    assert seen[0] < 1800 and seen[1] < 240 and seen[2] < 120
    assert all(45 < one < 120 for one in seen[3:])


def test_a_large_run_comes_to_its_own_rate():
    """16,384 devices with 8 failures a day, from the published prior and after far more failures than that."""
    day = 16_384 * 86400.0
    assert 1 / (16_384 * FailureRate(8, day).mean()) == pytest.approx(3 * HOUR, rel=0.1)
    assert 1 / (16_384 * FailureRate(240, day).mean()) == pytest.approx(360, rel=0.02)
    assert 0.3 * HOUR < 1 / (16_384 * FailureRate().mean()) < 3 * HOUR  # before anything is seen it is careful


@given(st.integers(0, 1000), st.floats(0, 1e14))
def test_more_failures_and_less_time_never_lower_the_rate(failures, device_s):
    here = FailureRate(failures, device_s).mean()
    assert 0 < here <= FailureRate(failures + 1, device_s).mean() * (1 + 1e-12)
    assert FailureRate(failures, 2 * device_s + 1).mean() <= here * (1 + 1e-12)


def test_due_and_the_words():
    now = [0.0]
    interval = Interval(4, clock=lambda: now[0])
    assert interval.seconds == FIRST_S and not interval.due(FIRST_S - 0.1) and interval.due(FIRST_S)
    said = "the first checkpoint after 10 s, to see what one costs; a failure is expected"
    assert interval.explain().startswith(said)
    interval.saved(0.5, 2.0)
    for _ in range(5):
        now[0] += 60
        interval.failed()
        interval.due(0.0)
    assert interval.rate.device_s == 1200
    assert interval.seconds == daly(0.5, interval.mtbf_s) and 5 < interval.seconds < 12
    assert interval.news() == interval.explain() and interval.news() is None
    assert interval.due(interval.seconds) and not interval.due(interval.seconds * 0.99)
    said = interval.explain()
    assert "one stalls training for 0.5 s and takes 2 s" in said and "5 failures in 0.333 device-hours seen" in said


def test_a_run_that_dies_before_its_first_save_saves_sooner():
    """Else it would begin anew for ever."""
    waits = [Interval(2, FailureRate(n, 2 * 8.0 * n)).seconds for n in range(6)]
    assert waits[0] == FIRST_S and waits[2] < 4 and waits == sorted(waits, reverse=True)


def test_bounds():
    interval = Interval(1, FailureRate(0, 1e12))
    interval.saved(10.0, 20.0)
    assert interval.seconds == MOST_S
    interval = Interval(1, FailureRate(1000, 1000.0))
    interval.saved(1e-4, 0.05)
    assert interval.seconds == LEAST_S
    for total_s in (50.0, 5000.0):  # saves never overlap
        interval = Interval(1, FailureRate(1000, 1000.0))
        interval.saved(0.1, total_s)
        assert interval.seconds == total_s


def test_what_the_log_teaches(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    run = MadeUpRun(tmp_path, clock, ranks=2)
    run.begin(startup_s=4.0)
    run.stage()
    run.steps(1, 10)  # 5 s
    run.save(10, stall_s=0.2)
    run.steps(8, 10)  # rolled back in place: a failure; 1.5 s
    run.end(None)  # killed: another
    clock.wait(50)
    run.begin(startup_s=3.0)
    run.end("failed", error="no step was made: not a failure of training")
    run.begin(startup_s=3.0)
    run.stage(start_step=10)
    run.steps(11, 14)  # 2 s
    run.save(14, stall_s=0.4, ok=False)
    run.end("stopped")
    interval = Interval.of(read(tmp_path), devices=2)
    assert interval.rate.failures == 2
    assert interval.rate.device_s == pytest.approx(2 * ((3 + 5 + 0.2 + 1.5) + (2 + 2 + 0.4)))
    assert interval.stalls_s == [0.2] and interval.totals_s == [0.9]
    run.begin(startup_s=3.0)
    run.stage(start_step=14)
    run.steps(15, 16)
    run.end("again")
    run.begin(startup_s=3.0)
    assert Interval.of(read(tmp_path), devices=2).rate.failures == 3
    run.stage(start_step=14)
    run.steps(15, 16)
    assert Interval.of(read(tmp_path), devices=2).rate.failures == 3  # the next stage asks in the same attempt


def test_dalys_formula_by_hand():
    # Young 100 s at C = 5, M = 1000; C/2M = 0.0025, its root 0.05
    assert young(5, 1000) == 100 and daly(5, 1000) == pytest.approx(100 * (1 + 0.05 / 3 + 0.0025 / 9))
    assert loss(100, 5, 1000) == pytest.approx(1000 * (exp(0.1) - 1) / 95)


def test_a_run_saves_by_it(tmp_path, monkeypatch):
    """A real run with every_time = "auto": it saves before its end, and says why as often as it does."""
    monkeypatch.setattr(plan, "FIRST_S", 0.02)
    monkeypatch.setattr(plan, "LEAST_S", 0.02)
    monkeypatch.setattr(plan, "PRIOR_DEVICE_S", 1.0)  # fails about once a second
    recipe = small_run.recipe(tmp_path)
    recipe["checkpoint"] = {"drill_every": "0s"}
    done = truestep.run(recipe)
    records = [record.data for record in read(done.directory)]
    saved = [data.step for data in records if isinstance(data, Save) and data.ok]
    assert len(saved) >= 3 and saved[-1] == 20 and saved[0] < 15
    said = [data.text for data in records if isinstance(data, Note) and "a checkpoint every" in data.text]
    assert said and said[0].startswith("base: a checkpoint every") and "one stalls training for" in said[0]
