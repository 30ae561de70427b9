"""Real runs in which workers, hosts and the supervisor die: each ends with the right weights, or says why it cannot."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from truestep.runlog import counters

from ..dist import free_port
from .runs import finish, kill, records, start, wait_for, wait_for_step, weights_digest, write_recipe


@dataclass
class Scene:
    """A run of its own name. `reference`: the weights that one process ends with."""

    folder: Path
    file: Path
    reference: str
    name: str
    address: str = ""

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def token(self) -> Path:
        return self.folder / "runs" / f".{self.name}.token"

    def counters(self, host: str = "") -> Path:
        return self.folder / f"{self.name}-{host}.counters"

    def run(self, processes: int = 3, hosts: str = "", **elastic: object) -> subprocess.Popen:
        settings = {"run.name": self.name, "machine.processes": processes}
        settings |= {f"machine.elastic.{name}": value for name, value in elastic.items()}
        more = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        places = {"TRUESTEP_COUNTERS": str(self.counters())} | ({"TRUESTEP_HOSTS": hosts} if hosts else {})
        return start("truestep", "run", str(self.file), *more, environment=places)

    def supervise(self, least: int, most: int) -> subprocess.Popen:
        """The run with one process on host a, where others may join."""
        self.address = f"127.0.0.1:{free_port()}"
        process = self.run(1, "a", min=least, max=most, listen=self.address)
        wait_for(self.token.exists, process)
        return process

    def join(self, processes: int) -> subprocess.Popen:
        """Host b."""
        verb = ["truestep", "node", self.address, "--token-file", str(self.token), "--processes", str(processes)]
        places = {"TRUESTEP_HOST": "b", "TRUESTEP_COUNTERS": str(self.counters("b"))}
        return start(*verb, environment=places)

    def worlds(self) -> list[int]:
        return [begun.world for begun in records(self.run_dir, "attempt_start")]

    def decisions(self) -> list[tuple[str, int | None]]:
        return [(decision.action, decision.world) for decision in records(self.run_dir, "decision")]


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Callable[[str], Scene]:
    """By name: runs of the recipe in exact mode."""
    folder = tmp_path_factory.mktemp("elastic")
    one = Scene(folder, write_recipe(folder, processes=3, numerics={"reduction": "exact"}), "", "one")
    counters.make(one.counters(), 1)  # nobody supervises this one
    code, output = finish(one.run(1))
    assert code == 0, output
    return lambda name: Scene(folder, one.file, weights_digest(one.run_dir), name)


def test_a_spare_takes_over_and_then_the_run_shrinks_with_the_same_weights(scene):
    """Three hosts and a spare, none of which may fail: the first SIGKILL brings the spare in, the second leaves two."""
    shrunk = scene("shrunk")
    process = shrunk.run(hosts="a,b,c,d", min=1, spares=1, restarts=0)
    wait_for_step(shrunk.run_dir, 6, process)
    kill(shrunk.counters(), rank=1)
    wait_for_step(shrunk.run_dir, 8, process, attempts=2)
    kill(shrunk.counters(), rank=0)
    code, output = finish(process)
    assert code == 0, output
    assert [begun.hosts for begun in records(shrunk.run_dir, "attempt_start")] == [
        ["a", "b", "c"],
        ["a", "c", "d"],
        ["c", "d"],
    ]
    assert shrunk.decisions() == [("evict", None), ("regroup", 3), ("evict", None), ("shrink", 2)]
    assert [(fault.host, fault.named) for fault in records(shrunk.run_dir, "fault")] == [("b", True), ("a", True)]
    assert weights_digest(shrunk.run_dir) == shrunk.reference


@pytest.mark.slow
def test_new_processes_where_survivors_must_not_stay_and_a_budget_that_ends(scene):
    spent = scene("spent")
    process = spent.run(restarts=1, regroup="false")
    wait_for_step(spent.run_dir, 6, process)
    kill(spent.counters(), rank=2)
    wait_for_step(spent.run_dir, 8, process, attempts=2)
    kill(spent.counters(), rank=1)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL
    assert "the run is given up: it failed 2 times" in output and "restarts allows 1" in output
    assert spent.decisions() == [("restart", 3), ("evict", None), ("stop", None)]
    assert records(spent.run_dir, "attempt_end")[-1].reason == "failed"
    assert (spent.run_dir / "elastic" / "state.json").exists()


def test_another_machine_joins_is_killed_and_comes_back(scene):
    """The run grows from one process to three at a checkpoint, goes on with one, and grows again."""
    joined = scene("joined")
    process = joined.supervise(1, 3)
    assert joined.token.stat().st_mode & 0o077 == 0
    node = joined.join(2)
    wait_for(lambda: 3 in joined.worlds(), process)
    os.kill(node.pid, signal.SIGKILL)
    again = joined.join(2)
    code, output = finish(process)
    assert code == 0, output
    assert finish(again)[0] == 0
    node.communicate(timeout=30)  # its workers, which hold its output, are gone too
    hosts = [begun.hosts for begun in records(joined.run_dir, "attempt_start")]
    assert hosts[0] == ["a"] and ["a", "b", "b"] in hosts
    assert [action for action, _ in joined.decisions()][:2] == ["grow", "shrink"]
    assert [(fault.kind, fault.host) for fault in records(joined.run_dir, "fault")] == [("lost", "b")]
    assert weights_digest(joined.run_dir) == joined.reference


@pytest.mark.slow
def test_a_machine_that_is_to_leave_is_left_after_a_checkpoint(scene):
    left = scene("left")
    process = left.supervise(1, 2)
    node = left.join(1)
    wait_for(lambda: 2 in left.worlds(), process)
    os.kill(node.pid, signal.SIGUSR1)
    node_code, node_output = finish(node)
    assert node_code == 0, node_output
    code, output = finish(process)
    assert code == 0, output
    assert [action for action, _ in left.decisions()] == ["grow", "shrink"]
    assert records(left.run_dir, "fault") == []  # nothing was lost: the steps were saved before
    steps = [step.step for step in records(left.run_dir, "step")]
    assert steps == sorted(set(steps))
    assert weights_digest(left.run_dir) == left.reference


def test_a_machine_ends_its_workers_when_its_supervisor_is_gone(scene):
    alone = scene("alone")
    process = alone.supervise(2, 2)
    node = alone.join(1)
    wait_for_step(alone.run_dir, 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)  # returns when its worker, which holds its output, is gone too
    deadline = time.monotonic() + 30
    workers = [row["pid"] for row in counters.read(alone.counters("b")) if row["pid"]]
    assert workers
    while not all(map(counters.is_gone, workers)):
        assert time.monotonic() < deadline, "workers live on without a supervisor"
        time.sleep(0.05)
    assert node.poll() is None  # it waits for a supervisor to come back
    os.kill(node.pid, signal.SIGTERM)
    code, output = finish(node)
    assert code == 0 and "the supervisor hung up; workers were ended" in output


@pytest.mark.slow
def test_torchrun_starts_attempts_and_a_killed_rank_is_started_again(scene):
    by_torchrun = scene("torchrun")
    process = by_torchrun.run(start="torchrun", regroup="")
    wait_for_step(by_torchrun.run_dir, 6, process)
    kill(by_torchrun.counters(), rank=2)
    code, output = finish(process)
    assert code == 0, output
    assert by_torchrun.decisions() == [("restart", 3)]
    assert records(by_torchrun.run_dir, "fault")[0].rank == 2
    assert weights_digest(by_torchrun.run_dir) == by_torchrun.reference
