"""Several hosts for real: each has a network and process ids of its own, and the network is cut.

What holds whatever is cut: no step is committed by two groups, and the weights come out the same. How long it takes is
bound by the heartbeat: LOST_S of silence end a machine for the supervisor, and the supervisor for a machine; within
SHORT_GRACE_S more the rest of the group is free for the next one.
"""

import json
import re
import secrets
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from truestep.checkpoint.catalogue import list_committed
from truestep.elastic.machines import BEAT_S, LOST_S
from truestep.elastic.supervisor import SHORT_GRACE_S
from truestep.recipe.dump import dump
from truestep.recipe.load import load
from truestep.runlog import counters
from truestep.runlog.log import read
from truestep.storage.store import open_store

from .. import small_run
from ..namespaces import PORT, Lan
from .runs import finish, records, start, wait_for, weights_digest

pytestmark = pytest.mark.usefixtures("hosts_are_there")
SLACK_S = 6.0
"""For processes that end and begin while others keep the machine busy."""
FAR_STEPS, SHORT_STEPS = 10, 60


@dataclass
class Started:
    """A command on a host, and the file that its output goes to."""

    process: subprocess.Popen
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()


@dataclass
class Scene:
    """A folder that all hosts share, and the run in it. `reference` is what one process makes of the recipe."""

    folder: Path
    lan: Lan
    name: str
    steps: int

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.name

    def start(self, host: str, *arguments: str) -> Started:
        """`python -m truestep ...` on a host, where nobody has said which interface to use."""
        output = self.folder / f"{self.name}-{host}.log"
        places = {"TRUESTEP_HOST": host, "TRUESTEP_COUNTERS": str(self.counters(host))}
        before = self.lan[host].command("env", "--unset=GLOO_SOCKET_IFNAME")
        return Started(start("truestep", *arguments, environment=places, before=before, output=output), output)

    def supervise(self, host: str, least: int, most: int) -> Started:
        """The run, supervised on a host with one process there."""
        settings = {"run.name": self.name, "machine.elastic.min": least, "machine.elastic.max": most}
        settings["machine.elastic.listen"] = f"0.0.0.0:{PORT}"
        more = [part for field, value in settings.items() for part in ("--set", f"{field}={value}")]
        return self.start(host, "run", str(recipe(self.folder, self.steps)), *more)

    def pair(self, least: int) -> tuple[Started, Started]:
        """The run on two hosts, one of which may suffice: that on host a, and the node on b."""
        node = self.join("b", "a")
        return self.supervise("a", least, 2), node

    def train(self, least: int = 2) -> tuple[Started, Started]:
        """A pair at work."""
        run, node = self.pair(least)
        self.until_trained(["a", "b"], run, node)
        return run, node

    def join(self, host: str, supervisor: str) -> Started:
        """A node with one process, which may be there before its supervisor is: so it is there once steps are done."""
        if not self.token.exists():
            self.token.parent.mkdir(exist_ok=True)
            self.token.write_text(secrets.token_hex(32))
        address = f"{self.lan[supervisor].address}:{PORT}"
        return self.start(host, "node", address, "--token-file", str(self.token), "--processes", "1")

    @property
    def token(self) -> Path:
        return self.run_dir.parent / f".{self.name}.token"

    def counters(self, host: str) -> Path:
        return self.folder / f"{self.name}-{host}.counters"

    def workers(self, host: str) -> list[int]:
        """The workers that live on a host, by the process ids there."""
        known = counters.read(self.counters(host)) if self.counters(host).exists() else []
        return sorted({row["pid"] for row in known} & self.lan[host].pids())

    def groups(self) -> list[list[str]]:
        """The hosts by rank of each attempt so far."""
        return [begun.hosts for begun in records(self.run_dir, "attempt_start")]

    def until_trained(self, hosts: list[str], *running: Started, steps: int = 3) -> None:
        """Until a group on these hosts is at work and has done that many steps."""

        def reached() -> bool:
            here, done = [], 0
            for record in read(self.run_dir):
                if record.kind == "attempt_start":
                    here, done = record.data.hosts, 0
                elif record.kind == "step" and here == hosts:
                    done += 1
            return done >= steps

        until(reached, *running)


def recipe(folder: Path, steps: int) -> Path:
    file = folder / f"{steps}.toml"
    if not file.exists():
        body = small_run.recipe(folder, tokens=steps * 12 * 32, evaluate={"data": "heldout", "every": 10**6})
        body["checkpoint"] |= {"every": 5, "keep": 0, "drill_every": "0s"}
        body["machine"] |= {"microbatch_rows": 3}
        body["numerics"] = {"reduction": "exact"}
        file.write_text(dump(load(body)))
    return file


def until(what: Callable[[], Any], *running: Started) -> Any:
    """Until `what()` is true, and that, while all these run."""
    try:
        return wait_for(what, *(each.process for each in running))
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *(each.said for each in running)])) from None


def lost(run: Started) -> bool:
    """Whether the supervisor has lost host b, and waits for another."""
    return re.search(r"host b .*; fewer than 2 processes can go on; waiting for hosts to join", run.said) is not None


def end(started: Started) -> str:
    """Wait for it to end well; what it said."""
    code, _ = finish(started.process)
    assert code == 0, started.said
    return started.said


@dataclass
class Reference:
    """What one process on one host makes of the recipe."""

    folder: Path
    _known: dict[int, str] = field(default_factory=dict)

    def digest(self, steps: int) -> str:
        """Of the weights after that many steps."""
        if steps not in self._known:
            file = recipe(self.folder, steps)
            code, output = finish(start("truestep", "run", str(file), "--set", f"run.name=one-{steps}"))
            assert code == 0, output
            self._known[steps] = weights_digest(self.folder / "runs" / f"one-{steps}")
        return self._known[steps]

    def steps_of_s(self, seconds: float) -> int:
        """How many steps take about that long here and now, to one process."""
        self.digest(SHORT_STEPS)
        took = [step.step_s for step in records(self.folder / "runs" / f"one-{SHORT_STEPS}", "step")]
        return max(SHORT_STEPS, int(seconds / median(took)) // 5 * 5)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture
def lan():
    with Lan("a", "b", "c") as lan:
        yield lan


def check(scene: Scene, reference: Reference) -> None:
    """No step was committed by two groups, none is missing, and the weights are right."""
    committed = committed_by(scene.run_dir)
    assert {step: who for step, who in committed.items() if len(who) > 1} == {}
    assert set(range(5, scene.steps + 1, 5)) <= committed.keys()
    store = open_store(str(scene.run_dir / "checkpoints" / "base"), {})
    counting = [commit.step for commit in list_committed(store)]
    assert counting == sorted(committed)
    assert weights_digest(scene.run_dir) == reference.digest(scene.steps)


def committed_by(run_dir: Path) -> dict[int, list[int]]:
    """The attempts that were told that they had committed a step, by step: of all that ever was logged, also by those
    that were cut off while they wrote."""
    found: dict[int, list[int]] = {}
    for segment in sorted((run_dir / "log").glob("events-*.jsonl")):
        for line in segment.read_text().splitlines(keepends=True):
            if '"kind":"save"' in line and line.endswith("\n") and (save := json.loads(line))["data"]["ok"]:
                found.setdefault(save["data"]["step"], []).append(save["attempt"])
    return found


def assert_lost_in_time(scene: Scene, host: str, cut_s: float) -> None:
    """How long after the cut (Unix time) the supervisor gave a host up, and how long after that the next group was
    chosen, or waited for."""
    fault = next(fault for fault in records(scene.run_dir, "fault") if fault.host == host and fault.kind == "lost")
    assert LOST_S - 2 * BEAT_S < fault.at_s - cut_s < LOST_S + BEAT_S + SLACK_S
    later = [each.at_s - fault.at_s for each in records(scene.run_dir, "decision") if each.at_s >= fault.at_s]
    assert later[0] < SHORT_GRACE_S + SLACK_S


def test_a_partition_ends_the_side_without_the_supervisor_and_the_other_goes_on(lan, tmp_path, reference):
    """Two hosts train, and the cable of one is pulled."""
    scene = Scene(tmp_path, lan, "parted", SHORT_STEPS)
    run, node = scene.train(least=1)
    assert scene.workers("b")
    lan["b"].pull()
    cut_s = time.time()
    until(lambda: "workers were ended" in node.said, node)
    assert LOST_S - 2 * BEAT_S < time.time() - cut_s < LOST_S + BEAT_S + SLACK_S
    assert scene.workers("b") == []
    end(run)
    assert_lost_in_time(scene, "b", cut_s)
    assert scene.groups()[-1] == ["a"]
    check(scene, reference)


@pytest.mark.slow
def test_two_hosts_make_the_weights_of_one(lan, tmp_path, reference):
    scene = Scene(tmp_path, lan, "two", SHORT_STEPS)
    run, node = scene.pair(2)
    end(run)
    end(node)
    assert scene.groups() == [["a", "b"]]
    assert records(scene.run_dir, "fault") == []
    check(scene, reference)


@pytest.mark.slow
def test_a_machine_joins_again_once_the_partition_is_healed(lan, tmp_path, reference):
    """The run needs two hosts: it waits for the one that was cut off."""
    scene = Scene(tmp_path, lan, "healed", SHORT_STEPS)
    run, node = scene.train()
    lan["b"].pull()
    cut_s = time.time()
    until(lambda: lost(run), run, node)
    lan["b"].plug()
    end(run)
    assert "trying to join again" in end(node)
    assert_lost_in_time(scene, "b", cut_s)
    assert scene.groups() == [["a", "b"], ["a", "b"]]
    check(scene, reference)


@pytest.mark.slow
def test_a_silence_shorter_than_the_heartbeat_allows_is_borne(lan, tmp_path, reference):
    scene = Scene(tmp_path, lan, "blinked", SHORT_STEPS)
    run, node = scene.train()
    lan["b"].pull()
    assert not lan["a"].hears(lan["b"])
    lan["b"].plug()
    end(run)
    end(node)
    assert scene.groups() == [["a", "b"]]
    assert records(scene.run_dir, "fault") == []
    check(scene, reference)


@pytest.mark.slow
@pytest.mark.parametrize("deaf, dumb", [("a", "b"), ("b", "a")])
def test_a_loss_in_one_direction_is_a_partition(lan, tmp_path, reference, deaf, dumb):
    """What `dumb` says to `deaf` is lost; the other direction works. Then that is healed."""
    scene = Scene(tmp_path, lan, f"{deaf}-hears-nothing", SHORT_STEPS)
    run, node = scene.train()
    lan[dumb].lose(lan[deaf])
    cut_s = time.time()
    until(lambda: "workers were ended" in node.said and lost(run), run, node)
    assert scene.workers("b") == []
    until(lambda: not scene.workers("a"), run, node)
    lan[dumb].find(lan[deaf])
    end(run)
    end(node)
    assert_lost_in_time(scene, "b", cut_s)
    assert scene.groups() == [["a", "b"], ["a", "b"]]
    check(scene, reference)


@pytest.mark.slow
def test_long_cables_only_take_longer(tmp_path, reference):
    """25 ms a cable, two cables between hosts: 50 ms each way."""
    with Lan("a", "b", delay_ms=25) as lan:
        scene = Scene(tmp_path, lan, "far", FAR_STEPS)
        run, node = scene.pair(2)
        end(run)
        end(node)
    assert scene.groups() == [["a", "b"]]
    assert records(scene.run_dir, "fault") == []
    assert min(step.step_s for step in records(scene.run_dir, "step")) > 0.05
    check(scene, reference)


@pytest.mark.slow
def test_the_host_of_rank_0_is_cut_off_from_the_supervisor_alone(lan, tmp_path, reference):
    """The group is on two hosts that hear each other and go on, with the log and the commits in their hands, while
    nobody hears the supervisor any more that leads it."""
    scene = Scene(tmp_path, lan, "first", reference.steps_of_s(3 * LOST_S))
    first = scene.join("b", "a")
    run = scene.supervise("a", 1, 2)
    until(lambda: "host b joined" in run.said, run, first)
    second = scene.join("c", "a")
    until(lambda: "host c joined" in run.said, run, first, second)
    scene.until_trained(["a", "b"], run, first, second)
    for pid in scene.workers("a"):  # so that host a is the last that is chosen
        lan["a"].kill(pid)
    scene.until_trained(["b", "c"], run, first, second)
    lan["a"].lose(lan["b"])
    lan["b"].lose(lan["a"])
    cut_s, cut_at = time.time(), len(records(scene.run_dir, "step"))
    until(lambda: "workers were ended" in first.said, run, first, second)
    assert scene.workers("b") == []
    assert len(records(scene.run_dir, "step")) > cut_at  # they did go on
    end(run)
    end(second)
    assert_lost_in_time(scene, "b", cut_s)
    assert "b" not in scene.groups()[-1]
    check(scene, reference)
