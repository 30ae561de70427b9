"""The supervisor over machines that pretend: what it decides on every way in which an attempt can end."""

import json
import signal

import pytest

from truestep.elastic import supervisor as module
from truestep.elastic.attempt import CRASHED
from truestep.elastic.budget import SAME_STEP
from truestep.runlog.log import RunLog, read

from .fakes import FakeMachine, ended, supervisor, waiting


@pytest.fixture(autouse=True)
def in_no_hurry(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.0)

    def too_long(*_):
        raise TimeoutError("the supervisor comes to no end")

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 20.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def scripted(*parts):
    """The n-th start is answered by the n-th part: codes, or a function of the order. Signals are not answered."""
    todo = list(parts)

    def script(machine, order):
        if order["do"] != "start":
            return []
        part = todo.pop(0)
        return part(order) if callable(part) else ended(order, part)

    return script


def machine(script, name="here", **hosts):
    return FakeMachine(name, hosts or {"a": 1, "b": 1, "c": 1}, script)


def posted(run_dir, kind):
    files = sorted((run_dir / "outbox").iterdir()) if (run_dir / "outbox").is_dir() else []
    events = [json.loads(file.read_bytes()) for file in files]
    return [event["data"] for event in events if event["kind"] == kind]


def decisions(run_dir):
    return [decision["action"] for decision in posted(run_dir, "decision")]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_what_is_no_crash_is_never_restarted(tmp_path, code):
    here = machine(scripted(code))
    outcome = supervisor(tmp_path, here).run()
    assert (outcome.code, outcome.sentence, len(here.starts), here.closed) == (code, "", 1, True)
    assert decisions(tmp_path) == []


def test_a_crash_is_restarted_with_new_processes(tmp_path):
    here = machine(scripted({0: 70, 1: -9, 2: 70}, 0))
    assert supervisor(tmp_path, here).run().code == 0
    assert [start["regroup"] for start in here.starts] == [False, False]
    assert [start["serial"] for start in here.starts] == [1, 2]
    (fault,) = posted(tmp_path, "fault")
    assert (fault["kind"], fault["rank"], fault["host"], fault["named"]) == ("exit", 0, "a", True)
    (decision,) = posted(tmp_path, "decision")
    assert (decision["action"], decision["world"]) == ("restart", 3) and 0 <= decision["seconds"] < 1


def test_what_comes_late_from_an_attempt_that_is_over_is_nobodys(tmp_path):
    late = {"is": "ended", "serial": 1, "rank": 0, "code": -9, "step": None}
    here = machine(scripted({0: 70, 1: -9, 2: 70}, lambda order: [late, *ended(order, 0)]))
    assert supervisor(tmp_path, here).run().code == 0
    assert len(here.starts) == 2


def test_survivors_regroup_and_the_dead_rank_is_replaced(tmp_path):
    here = machine(scripted(lambda order: waiting(order, 0, 2) + ended(order, {1: -9}), 0))
    assert supervisor(tmp_path, here).run().code == 0
    assert here.starts[1]["regroup"] and here.starts[1]["world"] == 3
    assert decisions(tmp_path) == ["regroup"]


def first_crash(*hosts_in_order):
    """Starts of which the worker on the named host crashes first."""

    def part(host):
        def tell(order):
            rank = next(rank["rank"] for rank in order["ranks"] if rank["host"] == host)
            return ended(order, {rank: -9}) + ended(order, {r["rank"]: 70 for r in order["ranks"] if r["rank"] != rank})

        return tell

    return [part(host) for host in hosts_in_order]


def test_a_host_over_its_budget_is_left_out_and_the_run_shrinks(tmp_path):
    here = machine(scripted(*first_crash("b", "b"), 0))
    found = supervisor(tmp_path, here, fewest=2, restarts=1)
    assert found.run().code == 0
    assert [[rank["host"] for rank in start["ranks"]] for start in here.starts] == [
        ["a", "b", "c"],
        ["a", "b", "c"],
        ["a", "c"],
    ]
    assert decisions(tmp_path) == ["restart", "evict", "shrink"]
    assert posted(tmp_path, "decision")[1]["host"] == "b"


def test_a_spare_takes_over(tmp_path):
    here = machine(scripted(*first_crash("b"), 0))
    found = supervisor(tmp_path, here, most=2)
    assert found.run().code == 0
    assert [rank["host"] for rank in here.starts[1]["ranks"]] == ["a", "c"]
    events = [(member["event"], member["host"]) for member in posted(tmp_path, "member")]
    assert events == [("joined", "a"), ("joined", "b"), ("joined", "c"), ("spare", "c"), ("spare", "b")]


def test_the_budget_of_the_run_ends_it(tmp_path):
    """Failures of which no host is named: the group broke, everybody lives."""
    here = machine(scripted(*[lambda order: waiting(order, 0, 1, 2)] * 6))
    outcome = supervisor(tmp_path, here, restarts=1).run()
    assert outcome.code == CRASHED and "machine.elastic.restarts allows 1 a host" in outcome.sentence
    assert len(here.starts) == 6  # each of three hosts could have had one, and one more
    end = list(read(tmp_path))[-1]
    assert end.kind == "attempt_end" and end.data.error == outcome.sentence
    assert any(r.kind == "decision" and r.data.action == "stop" for r in read(tmp_path))
    assert not list((tmp_path / "outbox").iterdir())


def test_one_step_that_fails_again_and_again_is_the_codes_fault(tmp_path):
    def crash(order):
        log = RunLog(tmp_path, order["serial"])
        log.append("attempt_end", reason="failed", error=f"rank 0 failed: ValueError({order['serial']})")
        log.close()
        return ended(order, 70, step=6)

    here = machine(scripted(*[crash] * SAME_STEP))
    outcome = supervisor(tmp_path, here, restarts=9).run()
    assert outcome.code == 70 and len(here.starts) == SAME_STEP
    assert "3 times in a row at step 6" in outcome.sentence and "ValueError(1)" in outcome.sentence


def test_hosts_that_the_workers_name_are_quarantined_for_good(tmp_path):
    def ask(order):
        (tmp_path / "elastic").mkdir(exist_ok=True)
        wish = {"attempt": 1, "reason": "rank 1 computes wrongly", "without": ["b"]}
        (tmp_path / "elastic" / "ask.json").write_text(json.dumps(wish))
        return ended(order, 75)

    here = machine(scripted(ask, 0))
    found = supervisor(tmp_path, here, fewest=2)
    assert found.run().code == 0
    assert [rank["host"] for rank in here.starts[1]["ranks"]] == ["a", "c"]
    assert decisions(tmp_path) == ["quarantine", "shrink"]
    assert not (tmp_path / "elastic" / "ask.json").exists()
    state = json.loads((tmp_path / "elastic" / "state.json").read_text())
    assert state["quarantined"] == {"b": "rank 1 computes wrongly"}
    assert ("quarantined", "b") in [(m["event"], m["host"]) for m in posted(tmp_path, "member")]


def test_too_few_hosts_end_the_run_with_their_names(tmp_path):
    here = machine(scripted(*first_crash("b")))
    outcome = supervisor(tmp_path, here, fewest=3, restarts=0).run()
    assert outcome.code == -9  # the signal that killed the rank
    assert "host b has failed once" in outcome.sentence


def test_a_machine_that_is_lost_takes_its_ranks_and_the_run_goes_on_without_it(tmp_path):
    there = machine(lambda *_: [], name="there", d=2)

    def lose(order):
        there.gone = "hung up"
        return waiting(order, 0, 1, 2)

    here = machine(scripted(lose, 0))
    assert supervisor(tmp_path, here, there).run().code == 0
    assert [start["world"] for start in here.starts] == [5, 3]
    assert (here.starts[0]["nodes"], there.starts[0]["node"]) == (2, 1)
    (fault,) = posted(tmp_path, "fault")
    assert (fault["kind"], fault["host"], fault["text"]) == ("lost", "d", "host d hung up")
    assert decisions(tmp_path) == ["shrink"]


def stopped(run_dir, attempt, reason="stopped"):
    log = RunLog(run_dir, attempt)
    log.append("attempt_end", reason=reason)
    log.close()


def test_a_host_that_leaves_is_waited_for_until_a_checkpoint_is_there(tmp_path):
    def answer(fake, order):
        if order["do"] == "start" and order["serial"] == 1:
            return [{"is": "leaving", "why": "SIGTERM"}] if fake.name == "there" else []
        if order["do"] == "signal":
            assert order["number"] == signal.SIGINT
            if fake.name == "here":
                stopped(tmp_path, 1)
            return ended(fake.starts[-1], 0)
        return ended(order, 0)

    here, there = machine(answer), machine(answer, name="there", d=1)
    assert supervisor(tmp_path, here, there).run().code == 0
    assert [start["world"] for start in here.starts] == [4, 3]
    assert decisions(tmp_path) == ["shrink"] and posted(tmp_path, "fault") == []


def test_a_run_that_finished_while_it_was_asked_to_change_hosts_is_over(tmp_path):
    def answer(fake, order):
        if order["do"] == "start":
            return [{"is": "leaving", "why": "SIGTERM"}] if fake.name == "there" else []
        if fake.name == "here":
            stopped(tmp_path, 1, reason="finished")
        return ended(fake.starts[-1], 0)

    here, there = machine(answer), machine(answer, name="there", d=1)
    assert supervisor(tmp_path, here, there).run().code == 0
    assert len(here.starts) == 1


def test_it_grows_at_a_checkpoint_once_all_ranks_train(tmp_path):
    def answer(fake, order):
        if order["do"] == "signal":
            if fake.name == "here":
                stopped(tmp_path, 1)
            return ended(fake.starts[-1], 0) if fake.starts else []
        return ended(order, 0) if order["serial"] == 2 else []

    here, there = machine(answer), machine(answer, name="there", d=1)
    found = supervisor(tmp_path, here, most=4)
    found.roster.open()
    found._next("the run begins", None)
    found.roster.machines["there"] = there
    found.members.joined("d", "there", 1)
    for _ in range(20):
        found.turn()
    assert here.signals == []  # nothing to save yet
    here.trains = True
    while found.outcome is None:
        found.turn()
    assert [start["world"] for start in here.starts] == [3, 4]
    assert decisions(tmp_path) == ["grow"]


def test_a_signal_stops_the_run_politely_and_a_second_ctrl_c_at_once(tmp_path):
    def polite(fake, order):
        if order["do"] == "start":
            signal.raise_signal(signal.SIGUSR1)
            return []
        return ended(fake.starts[-1], 0)

    here = machine(polite)
    assert supervisor(tmp_path, here).run().code == 0
    assert here.signals == [(signal.SIGINT, None)]

    def deaf(fake, order):
        if order["do"] == "start" or order["number"] == signal.SIGINT:
            signal.raise_signal(signal.SIGINT)
            return []
        return ended(fake.starts[-1], -9)

    here = machine(deaf)
    assert supervisor(tmp_path, here).run().code == -9
    assert here.signals == [(signal.SIGINT, None), (signal.SIGKILL, None)]
    assert decisions(tmp_path) == []


def test_ranks_that_could_not_stop_politely_are_nobodys_fault(tmp_path):
    """They were still starting: the group goes on without the host that leaves, and no failure is counted."""

    def answer(fake, order):
        if order["do"] == "start" and order["serial"] == 1:
            return [{"is": "leaving", "why": "SIGTERM"}] if fake.name == "there" else []
        if order["do"] == "signal":
            late = {0: 70, 1: 130, 2: 70, 3: 70} if fake.name == "there" else {1: 130, 0: 70, 2: 70}
            return ended(fake.starts[-1], late)
        return ended(order, 0)

    here, there = machine(answer), machine(answer, name="there", d=1)
    found = supervisor(tmp_path, here, there, restarts=0)
    assert found.run().code == 0
    assert [start["world"] for start in here.starts] == [4, 3]
    assert posted(tmp_path, "fault") == [] and found.members.budget.hosts == {}


def test_a_notice_stops_the_run_politely(tmp_path):
    notice = tmp_path / "notice"

    def polite(fake, order):
        if order["do"] == "start":
            notice.touch()
            return []
        return ended(fake.starts[-1], 0)

    here = machine(polite)
    assert supervisor(tmp_path, here, warnings=module.Warnings(notice)).run().code == 0
    assert here.signals == [(signal.SIGINT, None)]


@pytest.mark.parametrize("code, grace_s", [(70, 0.1), (-signal.SIGKILL, 100.0)])
def test_ranks_that_do_not_end_after_a_failure_are_killed_and_not_blamed(tmp_path, monkeypatch, code, grace_s):
    """At once if one was killed from outside: nobody has anything to say about that."""
    monkeypatch.setattr(module, "SHORT_GRACE_S", grace_s)

    def answer(fake, order):
        if order["do"] == "start":
            return ended(order, {1: code}) if order["serial"] == 1 else ended(order, 0)
        assert order["ranks"] == [0, 2]
        return ended(fake.starts[-1], {0: -9, 2: -9})

    here = machine(answer)
    found = supervisor(tmp_path, here)
    assert found.run().code == 0
    assert set(found.members.budget.hosts) == {"b"} and decisions(tmp_path) == ["restart"]


def test_nothing_is_written_before_the_run_is_there(tmp_path):
    here = machine(scripted(2))
    found = supervisor(tmp_path, here)
    (tmp_path / "run.json").unlink()
    assert found.run().code == 2
    assert list(tmp_path.iterdir()) == []
