"""Where a run stands: running, finished, stopped, failed, or silent; and the verbs that show it."""

import os
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tests.runlog.made_up import Clock, MadeUpRun, full_run
from truestep.cli import report as report_verb
from truestep.cli import status as status_verb
from truestep.dashboard.status import status
from truestep.errors import LogError, UserError
from truestep.runlog.log import segments


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_running_run(tmp_path, clock):
    run = full_run(tmp_path, clock)
    run.stage("more", steps=100, start="stage:base")
    run.steps(1, 30, "more")
    clock.wait(1.0)
    now = status(tmp_path, clock.now_s + 6)
    assert (now.run, now.state, now.reason, now.attempt, now.world) == ("made-up", "running", None, 2, 2)
    assert (now.stage, now.step, now.steps) == ("more", 30, 100)
    assert now.tokens_per_s == pytest.approx(2048) and now.step_s == pytest.approx(0.5)
    assert now.time_left_s == pytest.approx(35.0)
    assert now.loss is not None and now.held_out is None  # of the stage before
    assert now.saved is not None and now.saved.step == 40 and now.saved_age_s == pytest.approx(0.8 + 15 + 7)
    assert now.failed_saves == 0 and now.gates["base"].verdict == "pass" and now.age_s == pytest.approx(7)
    assert "quiet" in status(tmp_path, clock.now_s + 1000).says


def test_the_time_left_counts_evaluations_and_stalls(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage(steps=101)
    run.steps(1, 1)
    for step in range(2, 12):
        run.evaluate(step, 2.0, eval_s=1.5)
        run.steps(step, step)
    assert status(tmp_path, clock.now_s).time_left_s == pytest.approx(90 * 2.0)


def test_after_a_resume_before_its_first_step(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage(start_step=20)
    run.say("resume", stage="base", step=20, checkpoint="20-1")
    now = status(tmp_path, clock.now_s)
    assert (now.step, now.loss, now.tokens_per_s, now.time_left_s, now.saved) == (20, None, None, None, None)


@pytest.mark.parametrize(
    "reason, state, says",
    [
        ("finished", "finished", "all stages are done"),
        ("stopped", "stopped", "in order"),
        ("gate", "stopped", "a gate did not pass"),
        ("failed", "failed", "disk full"),
    ],
)
def test_a_run_that_ended(tmp_path, clock, reason, state, says):
    full_run(tmp_path, clock).end(reason, error="disk full" if reason == "failed" else None)
    now = status(tmp_path, clock.now_s)
    assert (now.state, now.reason, now.time_left_s) == (state, reason, None) and says in now.says
    assert (now.step, now.held_out.step if now.held_out else None) == (40, 40)


def test_failed_saves_in_a_row_are_counted(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage()
    for step, ok in ((5, True), (6, False), (7, False)):
        run.save(step, ok=ok)
    now = status(tmp_path, clock.now_s)
    assert now.failed_saves == 2 and now.saved is not None and now.saved.step == 5


def test_a_killed_process_has_failed_and_a_live_one_runs(tmp_path):
    code = (
        "import sys; from truestep.runlog.log import RunLog; log = RunLog(sys.argv[1], 1)\n"
        "log.append('note', text='up'); print('go', flush=True); sys.stdin.read()"
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes)
    assert child.stdout is not None and child.stdout.readline() == b"go\n"
    now = status(tmp_path)
    assert now.state == "running" and str(child.pid) in now.says
    child.send_signal(signal.SIGKILL)
    child.wait()
    with segments(tmp_path)[0].open("ab") as file:
        file.write(b'{"chain":"12')
    now = status(tmp_path)
    assert now.state == "failed" and "is gone without a word" in now.says
    assert "events-0001-0.jsonl line 3 is incomplete" in now.remarks[0]


def test_a_process_on_another_host_is_judged_by_its_last_record(tmp_path, clock, monkeypatch):
    monkeypatch.setattr("truestep.runlog.log.socket.gethostname", lambda: "elsewhere")
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage()
    run.steps(1, 3, step_s=30.0)
    run.end(None)
    monkeypatch.undo()
    assert status(tmp_path, clock.now_s + 299).state == "running"  # ten steps of patience
    now = status(tmp_path, clock.now_s + 301)
    assert now.state == "silent" and "host elsewhere" in now.says


def test_bad_directories_are_one_sentence(tmp_path):
    with pytest.raises(LogError, match="is not a run directory"):
        status(tmp_path)
    (tmp_path / "log").mkdir()
    with pytest.raises(LogError, match="has no records: the run has not begun"):
        status(tmp_path)


@pytest.fixture
def verbs():
    app = typer.Typer()
    app.command()(status_verb.status)
    app.command()(report_verb.report)
    return lambda *words: CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])


def test_the_verb_status_prints_it(tmp_path, clock, verbs):
    full_run(tmp_path, clock).end("finished")
    result = verbs("status", tmp_path)
    assert result.exit_code == 0
    for words in ("made-up", "finished", "40 of 40", "1.5000 bits per byte", "step 40 of base", "PASS", "tokens/s"):
        assert words in result.output
    assert isinstance(verbs("status", tmp_path / "no").exception, LogError)


def test_the_verb_report_writes_a_page_and_events(tmp_path, clock, verbs):
    full_run(tmp_path, clock).end("finished")
    assert verbs("report", tmp_path).exit_code == 0 and (tmp_path / "report.html").exists()
    result = verbs("report", tmp_path, "--out", tmp_path / "a.html", "--tensorboard", tmp_path / "board", "--follow")
    assert result.exit_code == 0 and (tmp_path / "a.html").exists()
    assert len(list((tmp_path / "board").iterdir())) == 1
    error = verbs("report", tmp_path, "--out", tmp_path / "b.html", "--follow").exception
    assert isinstance(error, UserError) and "--follow needs --tensorboard DIR" in str(error)
    assert not (tmp_path / "b.html").exists()


def test_everything_works_without_torch(tmp_path, clock):
    full_run(tmp_path, clock).end("finished")
    code = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; run = Path(sys.argv[1])\n"
        "from truestep.cli.report import report; from truestep.cli.status import status\n"
        "from truestep.ledger.card import build_card, write_card\n"
        "write_card(run, build_card(run, 'base')); status(run); report(run, tensorboard=run / 'board')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
