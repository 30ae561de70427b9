"""Followers of the log, and TensorBoard as the first of them."""

import sys

import pytest

from tests.runlog.made_up import Clock, MadeUpRun, full_run
from truestep.errors import UserError
from truestep.runlog.log import read
from truestep.runlog.records import Step
from truestep.runlog.sinks import TensorBoardSink, follow_log, scalars


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Memory:
    """The smallest sink."""

    def __init__(self):
        self.records, self.closed = [], False

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.closed = True


@pytest.mark.parametrize("make", [Memory, TensorBoardSink])
def test_every_sink_takes_every_kind_of_record(tmp_path, clock, make):
    full_run(tmp_path, clock).end("finished")
    sink = make() if make is Memory else make(tmp_path / "board")
    assert follow_log(tmp_path, [sink]) == sum(1 for _ in read(tmp_path))


def test_following_waits_for_more_until_the_attempt_ends(tmp_path, clock):
    run, sink, naps = MadeUpRun(tmp_path, clock), Memory(), []
    run.begin()
    run.stage()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        run.steps(len(naps), len(naps)) if len(naps) < 4 else run.end("finished")

    follow_log(tmp_path, [sink], until_end=True, sleep=nap)
    assert [r.data.step for r in sink.records if r.kind == "step"] == [1, 2, 3]
    assert sink.closed and sink.records[-1].kind == "attempt_end"


def test_ctrl_c_ends_following_and_closes_the_sinks(tmp_path, clock):
    run, sink = MadeUpRun(tmp_path, clock), Memory()
    run.begin()

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    assert follow_log(tmp_path, [sink], until_end=True, sleep=interrupt) == 2
    assert sink.closed


def test_tensorboard_reads_what_the_log_says(tmp_path, clock):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    full_run(tmp_path, clock).end("finished")
    follow_log(tmp_path, [TensorBoardSink(tmp_path / "board")])
    board = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0}).Reload()
    logged = [record for record in read(tmp_path) if isinstance(record.data, Step)]
    events = board.Scalars("base/train/loss")
    assert [(e.step, e.value) for e in events] == [(r.data.step, pytest.approx(r.data.loss, rel=1e-6)) for r in logged]
    assert events[0].wall_time == logged[0].time_s
    assert [e.value for e in board.Scalars("base/held-out/bits_per_byte")] == pytest.approx([4.4 / 2.2, 3.6 / 2.2, 1.5])
    assert [e.value for e in board.Scalars("base/checkpoint/ok")] == [1.0, 0.0, 1.0]
    text = board.Tensors(
        "base/gate/text_summary" if "base/gate/text_summary" in board.Tags()["tensors"] else "base/gate"
    )
    assert b"**pass**" in text[0].tensor_proto.string_val[0]


def test_a_missing_value_gives_no_point(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage()
    run.steps(1, 1, data_s=None)
    run.say("eval", stage="base", step=1, loss=2.0, targets=5, eval_s=0.1)
    tags = {tag for record in read(tmp_path) for tag, _, _ in scalars(record)}
    assert "base/train/loss" in tags and "base/held-out/loss" in tags
    assert not tags & {"base/train/data_s", "base/held-out/bits_per_byte"}


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(UserError, match=r"TensorBoard is not installed; install the extra with"):
        TensorBoardSink(tmp_path / "board")
    assert not (tmp_path / "board").exists()
