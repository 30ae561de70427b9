"""Goodput, ETTR and the ideal schedule from the log alone: sums by hand, and that nothing is ever lost or negative."""

from itertools import pairwise
from math import sqrt
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runlog.made_up import Clock, MadeUpRun
from truestep.ledger.goodput import goodput, ideal_interval
from truestep.ledger.history import collect
from truestep.ledger.timeline import KINDS, timeline
from truestep.runlog.log import RunLog, next_attempt, read
from truestep.runlog.records import KINDS as RECORDS
from truestep.runlog.records import Record


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def found(path):
    return goodput(collect(read(path)))


def lines(path):
    return [line.seconds for line in found(path).lines]


def outbox(run: MadeUpRun, kind: str, at_s: float, /, **values) -> None:
    """An event of the supervisor's that is taken in later than it happened."""
    run.say(kind, at_s=at_s, id=f"{kind}-{at_s}", **values)


def three_attempts(path: Path, clock: Clock) -> MadeUpRun:
    """Killed at 12 after a checkpoint of 10, then hung at 18 and was ended, then stopped in order and went on."""
    run = MadeUpRun(path, clock)
    run.begin(startup_s=4.0)
    run.stage()
    run.steps(1, 10)
    run.save(10, stall_s=0.2)
    run.steps(11, 12)
    run.end(None)
    clock.wait(0.3)
    noticed_s = clock.now_s
    clock.wait(0.7)
    run.begin(startup_s=3.0)
    outbox(run, "fault", noticed_s, kind="exit", text="rank 1 was killed by signal 9", rank=1, host="b", named=True)
    outbox(run, "decision", noticed_s, action="restart", reason="rank 1 was killed", world=2)
    run.stage(start_step=10)
    run.steps(11, 18)
    clock.wait(20.0)
    run.say("fault", kind="hang", text="rank 0 stands at step 19", rank=0, named=True)
    clock.wait(1.0)
    run.end("again")
    clock.wait(0.5)
    run.begin(startup_s=2.0)
    run.stage(start_step=10)
    run.steps(11, 20)
    run.evaluate(20, 3.0, eval_s=1.5)
    run.end("stopped")
    clock.wait(1000.0)
    run.begin(startup_s=5.0)
    run.stage(start_step=20)
    run.steps(21, 22)
    run.end("finished")
    return run


def test_four_attempts_by_hand(tmp_path, clock):
    three_attempts(tmp_path, clock)
    first, second, third, fourth = lines(tmp_path)
    assert first == pytest.approx(
        {"start-up": 4, "productive": 12 * 0.45, "data wait": 12 * 0.05, "checkpoint stall": 0.2}
    )
    assert second == pytest.approx(
        {
            "detection": 0.3 + 20,
            "restart": 0.7 + 3 + 1,
            "rework": 2 * 0.45,
            "productive": 6 * 0.45,
            "data wait": 8 * 0.05,
        }
    )
    assert third == pytest.approx(
        {"restart": 0.5 + 2, "rework": 8 * 0.45, "productive": 2 * 0.45, "data wait": 0.5, "evaluation": 1.5}
    )
    assert fourth == pytest.approx({"idle": 1000, "start-up": 5, "productive": 0.9, "data wait": 0.1})
    whole = found(tmp_path)
    wanted = whole.wall_s - 1000
    assert whole.failures == 2
    assert whole.goodput.value == pytest.approx(22 * 0.45 / wanted)
    lost = 9 + 20.3 + 4.7 + 2.5 + 10 * 0.45 + 0.2
    assert whole.ettr.value == pytest.approx((wanted - lost) / wanted)
    trained_s = 22 * 0.45 + 32 * 0.05 + 1.5
    best_s = max(sqrt(2 * 0.2 * trained_s / 2), 0.9)
    ideal_lost = 0.2 * trained_s / best_s + 2 * (best_s / 2 + 0.9)
    assert whole.ideal.value == pytest.approx(22 * 0.45 / (wanted - 0.2 - 10 * 0.45 + ideal_lost))
    assert whole.of(whole.lines[0]) == pytest.approx(5.4 / 10.2)
    assert "2410.21680" in whole.ettr.method and "2 failures, a save each" in whole.ideal.method


def test_pieces_touch_and_tell_where_the_time_went(tmp_path, clock):
    three_attempts(tmp_path, clock)
    pieces = [piece for line in timeline(collect(read(tmp_path))).lines for piece in line.pieces]
    assert all(a.end_s == b.begin_s and a.begin_s < a.end_s for a, b in pairwise(pieces))
    kinds = [piece.kind for piece in pieces if piece.kind not in ("productive", "data wait", "rework")]
    assert kinds == [
        *("start-up", "checkpoint stall", "detection", "restart", "detection", "restart"),
        *("restart", "evaluation", "idle", "start-up"),  # of the third and the fourth attempt
    ]


def test_roll_back_in_place(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin(startup_s=2.0)
    run.stage()
    run.steps(1, 6)
    run.say("fault", kind="spike", text="loss 11.3 at step 6", stage="base", step=6)
    clock.wait(0.25)
    run.say("decision", action="roll back", reason="spikes", stage="base", step=6, to_step=4)
    clock.wait(0.25)
    run.steps(5, 8)
    run.end("finished")
    assert lines(tmp_path) == [
        pytest.approx({"start-up": 2, "productive": 8 * 0.45, "data wait": 0.5, "rework": 0.9, "restart": 0.5})
    ]
    assert found(tmp_path).failures == 1


def test_a_running_attempt_and_one_that_restarts(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin(startup_s=2.0)
    run.stage()
    run.steps(1, 4)
    clock.wait(3.0)
    run.say("note", text="still there")
    assert lines(tmp_path)[0]["other"] == pytest.approx(3.0) and found(tmp_path).failures == 0
    run.end("failed", error="RuntimeError: connection closed by peer")
    assert lines(tmp_path)[0]["detection"] == pytest.approx(3.0) and found(tmp_path).failures == 1
    clock.wait(1.0)
    run.begin(startup_s=2.0)
    assert lines(tmp_path)[1] == pytest.approx({"restart": 2.0})  # up to its newest record
    run.end(None)
    clock.wait(5.0)
    run.begin(startup_s=1.0)
    run.stage(start_step=4)
    run.steps(5, 5)
    assert lines(tmp_path)[2]["restart"] == pytest.approx(1 + 5 + 1) and found(tmp_path).failures == 1


def test_events_between_two_lives_belong_to_the_restart(tmp_path, clock):
    """The supervisor takes events in when no worker lives, as an attempt without a start."""
    run = MadeUpRun(tmp_path, clock)
    run.begin(startup_s=1.0)
    run.stage()
    run.steps(1, 2)
    run.end(None)
    clock.wait(4.0)
    log = RunLog(tmp_path, next_attempt(tmp_path))
    log.append("fault", kind="lost", text="host b is gone", host="b", named=True, at_s=clock.now_s - 1, id="1")
    log.close()
    clock.wait(2.0)
    run.begin(startup_s=1.0)
    run.stage(start_step=2)
    run.steps(3, 3)
    run.end("finished")
    whole = found(tmp_path)
    assert whole.seconds["detection"] == pytest.approx(3.0) and whole.seconds["restart"] == pytest.approx(1 + 2 + 1)
    assert whole.failures == 1


def test_a_start_that_failed_lost_no_work(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin(startup_s=2.0)
    run.end("failed", error="machine.mesh does not fit")
    clock.wait(3.0)
    run.begin(startup_s=2.0)
    run.stage()
    run.steps(1, 2)
    run.end("finished")
    whole = found(tmp_path)
    assert whole.failures == 0 and whole.seconds["restart"] == pytest.approx(7) and whole.seconds["detection"] == 0


def test_a_restarted_attempt_does_not_begin_at_the_first_command(tmp_path, clock):
    """The supervisor may pass on when the run was asked for; no second counts twice for that."""
    launched_s = clock.now_s
    run = three_attempts(tmp_path, clock)
    clock.wait(1.0)
    run.begin(startup_s=1.0)
    run.say("attempt_start", **START | {"launched_s": launched_s})
    history = collect(read(tmp_path))
    assert history.attempts[-1].begin_s == pytest.approx(history.attempts[-2].end_s)
    assert sum(span.wall_s for span in history.spans) <= clock.now_s - launched_s


def test_ideal_interval_by_hand():
    assert ideal_interval(0, 1000, 1, 5) == (None, 0.0)
    assert ideal_interval(5, 1000, 0.1, 1) == (
        pytest.approx(sqrt(40)),
        pytest.approx(100 / sqrt(40) + 5 * sqrt(10) + 5),
    )
    assert ideal_interval(5, 1000, 0.1, 20) == (20, pytest.approx(5 + 5 * 30))  # never closer than a save takes
    assert ideal_interval(5, 1000, 0.0, 0.0) == (0.0, 0.0)


START = dict(world=1, host="h", digests={}, versions={}, devices={})
SECONDS = st.floats(0, 1e5)
EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 6), SECONDS, SECONDS | st.none()),
    st.tuples(st.just("eval"), SECONDS),
    st.tuples(st.just("save"), st.integers(1, 6), SECONDS, st.booleans()),
    st.tuples(st.just("phase"), st.sampled_from(["export", "gate", "other"]), SECONDS),
    st.tuples(st.just("fault"), SECONDS | st.none()),
    st.tuples(st.just("end"), st.sampled_from(["finished", "stopped", "gate", "again", "failed"])),
    st.tuples(st.just("attempt"), SECONDS | st.none()),
    st.tuples(st.just("note"), SECONDS),
)


def record_of(event, seq: int, now: float, attempt: int) -> Record:
    kind, *values = event
    if kind == "step":
        step, step_s, data_s = values
        fields = dict(step=step, tokens=1, targets=1, loss=1.0, grad_norm=1.0, lr=1.0, step_s=step_s, data_s=data_s)
    elif kind == "eval":
        fields = dict(step=1, loss=1.0, targets=1, eval_s=values[0])
    elif kind == "save":
        fields = dict(step=values[0], ok=values[2], stall_s=values[1])
    elif kind == "phase":
        fields = dict(name=values[0], seconds=values[1])
    elif kind == "fault":
        fields = dict(kind="exit", text="", at_s=None if values[0] is None else now - values[0])
    elif kind == "end":
        kind, fields = "attempt_end", dict(reason=values[0])
    elif kind == "attempt":
        launched_s = None if values[0] is None else now - values[0]
        kind, fields = "attempt_start", START | dict(launched_s=launched_s)
    else:
        fields = dict(text="")
    stage = {"stage": "base"} if kind in ("step", "eval", "save") else {}
    return Record(seq, now, attempt, kind, RECORDS[kind](**stage, **fields), "")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 1e4), EVENTS), max_size=40))
def test_any_log_adds_up(steps):
    """Whatever the records claim, no kind is negative, and together they are the wall time to the microsecond."""
    now, attempt, records = 1.7e9, 1, []
    for seq, (wait, event) in enumerate(steps):
        now = round(now + wait, 3)
        attempt += event[0] == "attempt"
        records.append(record_of(event, seq, now, attempt))
    history = collect(records)
    whole = timeline(history)
    micros = whole.micros()
    assert all(us >= 0 for us in micros.values()) and set(KINDS) <= set(micros)
    for line in whole.lines:
        assert all(us > 0 for us in line.micros.values())
        assert all(a.end_s == b.begin_s for a, b in pairwise(line.pieces))
    begin = round(history.attempts[0].begin_s * 1e6) if records else 0
    end = max((round(record.time_s * 1e6) for record in records), default=0)
    assert sum(micros.values()) == end - begin
    figures = goodput(history)
    for figure in (figures.goodput, figures.ettr):
        assert figure.value is None or 0 <= figure.value <= 1
    assert figures.wall_s == pytest.approx(sum(figures.seconds.values()))
