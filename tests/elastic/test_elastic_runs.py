"""Real runs in which workers, hosts and the supervisor die: each ends with the right weights, or says why it cannot."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from truestep.runlog import counters

from .runs import finish, kill, records, start, wait_for, wait_for_step, weights_digest, write_recipe

EXACT = {"numerics": {"reduction": "exact"}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A folder, the recipe in exact mode for three processes, and the weights that one process ends with."""
    folder = tmp_path_factory.mktemp("elastic")
    file = write_recipe(folder, processes=3, **EXACT)
    code, output = finish(start("truestep", "run", str(file), "--set", "machine.processes=1", "--set", "run.name=one"))
    assert code == 0, output
    return folder, file, weights_digest(folder / "runs" / "one")


def elastic(**fields: object) -> list[str]:
    return [part for name, value in fields.items() for part in ("--set", f"machine.elastic.{name}={value}")]


def decisions(run_dir: Path) -> list[tuple[str, int | None]]:
    return [(decision.action, decision.world) for decision in records(run_dir, "decision")]


def test_a_spare_takes_over_and_then_the_run_shrinks_with_the_same_weights(exact):
    """Three hosts and a spare, none of which may fail: the first SIGKILL brings the spare in, the second leaves two."""
    folder, file, reference = exact
    run_dir, counted = folder / "runs" / "shrunk", folder / "shrunk.counters"
    places = {"TRUESTEP_HOSTS": "a,b,c,d", "TRUESTEP_COUNTERS": str(counted)}
    more = ["--set", "run.name=shrunk", *elastic(min=1, spares=1, restarts=0)]
    process = start("truestep", "run", str(file), *more, environment=places)
    wait_for_step(run_dir, 6, process)
    kill(counted, rank=1)
    wait_for_step(run_dir, 8, process, attempts=2)
    kill(counted, rank=0)
    code, output = finish(process)
    assert code == 0, output
    assert [begun.hosts for begun in records(run_dir, "attempt_start")] == [
        ["a", "b", "c"],
        ["a", "c", "d"],
        ["c", "d"],
    ]
    assert decisions(run_dir) == [("evict", None), ("regroup", 3), ("evict", None), ("shrink", 2)]
    assert [(fault.host, fault.named) for fault in records(run_dir, "fault")] == [("b", True), ("a", True)]
    assert weights_digest(run_dir) == reference


@pytest.mark.slow
def test_new_processes_where_survivors_must_not_stay_and_a_budget_that_ends(exact):
    folder, file, _ = exact
    run_dir, counted = folder / "runs" / "spent", folder / "spent.counters"
    more = ["--set", "run.name=spent", *elastic(restarts=1, regroup="false")]
    process = start("truestep", "run", str(file), *more, environment={"TRUESTEP_COUNTERS": str(counted)})
    wait_for_step(run_dir, 6, process)
    kill(counted, rank=2)
    wait_for_step(run_dir, 8, process, attempts=2)
    kill(counted, rank=1)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL
    assert "the run is given up: it failed 2 times" in output and "restarts allows 1" in output
    assert decisions(run_dir) == [("restart", 3), ("evict", None), ("stop", None)]
    assert records(run_dir, "attempt_end")[-1].reason == "failed"
    assert (run_dir / "elastic" / "state.json").exists()


def test_another_machine_joins_is_killed_and_comes_back(exact):
    """The run grows from one process to three at a checkpoint, goes on with one, and grows again."""
    folder, file, reference = exact
    run_dir, listen = folder / "runs" / "joined", f"127.0.0.1:{free_port()}"
    more = ["--set", "run.name=joined", "--set", "machine.processes=1", *elastic(min=1, max=3, listen=listen)]
    process = start("truestep", "run", str(file), *more, environment={"TRUESTEP_HOST": "a"})
    token = folder / "runs" / ".joined.token"
    wait_for(token.exists, process)
    assert token.stat().st_mode & 0o077 == 0
    verb = ["truestep", "node", listen, "--token-file", str(token), "--processes", "2"]
    node = start(*verb, environment={"TRUESTEP_HOST": "b"})
    wait_for(lambda: any(begun.world == 3 for begun in records(run_dir, "attempt_start")), process)
    os.kill(node.pid, signal.SIGKILL)
    again = start(*verb, environment={"TRUESTEP_HOST": "b"})
    code, output = finish(process)
    assert code == 0, output
    assert finish(again)[0] == 0
    node.communicate(timeout=30)  # its workers, which hold its output, are gone too
    hosts = [begun.hosts for begun in records(run_dir, "attempt_start")]
    assert hosts[0] == ["a"] and ["a", "b", "b"] in hosts
    assert [action for action, _ in decisions(run_dir)][:2] == ["grow", "shrink"]
    assert [(fault.kind, fault.host) for fault in records(run_dir, "fault")] == [("lost", "b")]
    assert weights_digest(run_dir) == reference


@pytest.mark.slow
def test_a_machine_that_is_to_leave_is_left_after_a_checkpoint(exact):
    folder, file, reference = exact
    run_dir, listen = folder / "runs" / "left", f"127.0.0.1:{free_port()}"
    more = ["--set", "run.name=left", "--set", "machine.processes=1", *elastic(min=1, max=2, listen=listen)]
    process = start("truestep", "run", str(file), *more, environment={"TRUESTEP_HOST": "a"})
    token = folder / "runs" / ".left.token"
    wait_for(token.exists, process)
    node = start(
        *["truestep", "node", listen, "--token-file", str(token), "--processes", "1"],
        environment={"TRUESTEP_HOST": "b"},
    )
    wait_for(lambda: any(begun.world == 2 for begun in records(run_dir, "attempt_start")), process)
    os.kill(node.pid, signal.SIGUSR1)
    node_code, node_output = finish(node)
    assert node_code == 0, node_output
    code, output = finish(process)
    assert code == 0, output
    assert [action for action, _ in decisions(run_dir)] == ["grow", "shrink"]
    assert records(run_dir, "fault") == []  # nothing was lost: the steps were saved before
    steps = [step.step for step in records(run_dir, "step")]
    assert steps == sorted(set(steps))
    assert weights_digest(run_dir) == reference


def test_a_machine_ends_its_workers_when_its_supervisor_is_gone(exact):
    folder, file, _ = exact
    run_dir, listen = folder / "runs" / "alone", f"127.0.0.1:{free_port()}"
    more = ["--set", "run.name=alone", "--set", "machine.processes=1", *elastic(min=2, max=2, listen=listen)]
    process = start("truestep", "run", str(file), *more, environment={"TRUESTEP_HOST": "a"})
    token = folder / "runs" / ".alone.token"
    wait_for(token.exists, process)
    counted = folder / "alone.counters"
    places = {"TRUESTEP_HOST": "b", "TRUESTEP_COUNTERS": str(counted)}
    node = start(*["truestep", "node", listen, "--token-file", str(token)], environment=places)
    wait_for_step(run_dir, 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)  # returns when its worker, which holds its output, is gone too
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in _pids(counted)):
        assert time.monotonic() < deadline, "workers live on without a supervisor"
        time.sleep(0.05)
    assert node.poll() is None  # it waits for a supervisor to come back
    os.kill(node.pid, signal.SIGTERM)
    code, output = finish(node)
    assert code == 0 and "the supervisor hung up; workers were ended" in output


def _pids(counted: Path) -> list[int]:
    return [row["pid"] for row in counters.read(counted) if row["pid"]]


@pytest.mark.slow
def test_torchrun_starts_attempts_and_a_killed_rank_is_started_again(exact):
    folder, file, reference = exact
    run_dir, counted = folder / "runs" / "torchrun", folder / "torchrun.counters"
    more = ["--set", "run.name=torchrun", *elastic(start="torchrun", regroup="")]
    process = start("truestep", "run", str(file), *more, environment={"TRUESTEP_COUNTERS": str(counted)})
    wait_for_step(run_dir, 6, process)
    kill(counted, rank=2)
    code, output = finish(process)
    assert code == 0, output
    assert decisions(run_dir) == [("restart", 3)]
    assert records(run_dir, "fault")[0].rank == 2
    assert weights_digest(run_dir) == reference
