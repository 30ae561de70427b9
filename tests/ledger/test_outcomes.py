"""What became of injected faults, judged from logs that were made up."""

import pytest

from tests.ledger.test_goodput import outbox
from tests.runlog.made_up import Clock, MadeUpRun
from truestep.ledger.outcomes import Injection, outcomes
from truestep.recipe.chaos import Fault
from truestep.runlog.log import read


@pytest.fixture
def run(tmp_path, monkeypatch):
    run = MadeUpRun(tmp_path, Clock(monkeypatch))
    run.begin(hosts=["a", "b"])
    run.stage()
    run.steps(1, 6)
    return run


def fault(kind: str, **more) -> Fault:
    given = {"rank": 1} if kind in ("kill", "stop", "slow") else {}
    return Fault.model_validate({"kind": kind, "step": 7} | given | more)


def judged(run: MadeUpRun, *injections: Injection, hang_s: float = 300.0):
    return outcomes(injections, list(read(run.path)), hang_s)


def killed(run: MadeUpRun, rank: int = 1, host: str = "b", **more) -> float:
    """Somebody dies now, is noticed 0.2 s later, and the run goes on after 1.5 s."""
    at_s = run.clock.now_s
    run.clock.wait(0.2)
    values = dict(text=f"rank {rank} on host {host} was killed by SIGKILL", rank=rank, host=host, named=True) | more
    run.end(None)
    run.clock.wait(0.8)
    run.begin(startup_s=0.2, hosts=["a", "b"])
    outbox(run, "fault", at_s + 0.2, kind="exit", **values)
    outbox(run, "decision", at_s + 0.3, action="restart", reason="rank 1 was killed", world=2)
    run.stage(start_step=5)
    run.steps(6, 9)
    return at_s


def test_a_kill_that_was_noticed_and_located(run):
    at_s = killed(run)
    (found,) = judged(run, Injection(fault("kill"), at_s, 7))
    assert found.verdict == "as expected" and found.expected == "located" and found.located is True
    assert found.detected_s == pytest.approx(0.2)
    assert found.recovered_s == pytest.approx(0.2 + 0.8 + 1.0 + 2 * 0.5 - 0.8)  # the second step is the lost one
    assert found.decisions == ["restart, 2 processes from here on: rank 1 was killed"]


def test_the_wrong_one_named(run):
    at_s = killed(run, rank=0, host="a")
    (found,) = judged(run, Injection(fault("kill"), at_s, 7))
    assert found.located is False and found.verdict == "wrong one named"


def test_nobody_named(run):
    at_s = killed(run, named=False)
    for expect, verdict in (("auto", "not noticed"), ("detected", "as expected"), ("tolerated", "as expected")):
        (found,) = judged(run, Injection(fault("kill", expect=expect), at_s, 7))
        assert found.located is None and found.verdict == verdict


def test_never_injected_and_never_recovered(run):
    at_s = run.clock.now_s
    run.say("fault", kind="exit", text="rank 1 was killed", rank=1, host="b", named=True)
    run.end("failed")
    never = Injection(fault("corrupt"), why_not="there is no checkpoint")
    gone, not_injected = judged(run, Injection(fault("kill"), at_s, 7), never)
    assert (gone.verdict, not_injected.verdict) == ("not recovered", "not injected")


def test_every_notice_counts_once_and_for_the_right_one(run):
    """A process is stopped for a while and noticed by nobody; another is killed: that is the kill's notice."""
    stopped_s = run.clock.now_s
    run.steps(7, 8)
    killed_s = killed(run)
    stop, kill = judged(run, Injection(fault("stop", rank=0), stopped_s, 7), Injection(fault("kill"), killed_s, 9))
    assert stop.noticed is None and stop.expected == "tolerated" and stop.verdict == "as expected"
    assert kill.verdict == "as expected"
    twice = judged(run, *[Injection(fault("kill"), killed_s, 9)] * 2)
    assert sorted(one.verdict for one in twice) == ["as expected", "not noticed"]


def test_what_was_said_before_is_not_about_it(run):
    killed(run)
    run.clock.wait(1.0)
    (found,) = judged(run, Injection(fault("kill"), run.clock.now_s, 9))
    assert found.noticed is None and found.verdict == "not noticed"


def test_a_stop_longer_than_the_patience_is_to_be_located(run):
    assert (
        fault("stop", seconds="10s").expected(5.0) == "located"
        and fault("stop", seconds="10s").expected(20.0) == "tolerated"
    )
    at_s = run.clock.now_s
    run.clock.wait(6)
    run.say("fault", kind="hang", text="rank 1 stands in step 7", rank=1, host="b", named=True)
    run.end("again")
    run.begin(startup_s=1.0, hosts=["a", "b"])
    run.stage(start_step=6)
    run.steps(7, 8)
    (found,) = judged(run, Injection(fault("stop", seconds="10s"), at_s, 7), hang_s=5.0)
    assert found.verdict == "as expected" and found.detected_s == pytest.approx(6)


def test_saves_resumes_and_drills_tell_of_disks(run):
    at_s = run.clock.now_s
    run.steps(7, 7)
    run.save(7, ok=False)
    run.steps(8, 8)
    (full,) = judged(run, Injection(fault("fill", seconds="1s"), at_s, 7))
    assert full.verdict == "as expected" and full.noticed is not None and "No space left" in full.noticed.says
    corrupted_s = run.clock.now_s
    run.say("drill", stage="base", step=5, checkpoint="5-1", ok=False, seconds=1.0, level="scrub", text="bytes 0 to 9")
    run.say("fault", kind="checkpoint", text="the checkpoint is not sound: bytes 0 to 9", stage="base", step=5)
    run.steps(9, 9)
    corrupt, other = judged(
        run, Injection(fault("corrupt"), corrupted_s, 8), Injection(fault("corrupt"), corrupted_s, 8)
    )
    assert corrupt.verdict == "as expected" and corrupt.noticed is not None and "bytes 0 to 9" in corrupt.noticed.says
    assert other.verdict == "not noticed"  # a drill is one notice, though it leaves two records


def test_a_flip_sits_on_a_host(run):
    at_s = run.clock.now_s
    run.say("fault", kind="state", text="bits changed", stage="base", step=7, rank=0, host="b", named=True)
    run.steps(7, 7)
    (found,) = judged(run, Injection(fault("flip", site="state", rank=1), at_s, 7, host="b"))
    assert found.located is True  # ranks may have been numbered anew
    (found,) = judged(run, Injection(fault("flip", site="state", rank=0), at_s, 7))
    assert found.located is False  # rank 0 was on host a


def test_a_run_that_had_no_more_to_do_recovered(run):
    at_s = run.clock.now_s
    run.say("fault", kind="save", text="no space is left", step=6)
    run.clock.wait(2.0)
    run.end("finished")
    (found,) = judged(run, Injection(fault("fill", seconds="1s"), at_s, 7))
    assert found.verdict == "as expected" and found.recovered_s == pytest.approx(2.0)
