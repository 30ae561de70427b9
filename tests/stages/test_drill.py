"""Drills of restores: sound checkpoints pass, damaged ones are quarantined and passed over; and drills beside a run."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.dist import run_job
from tests.stages.test_replay import carry_out, exact
from truestep.checkpoint import writer
from truestep.checkpoint.catalogue import list_committed, newest
from truestep.checkpoint.marks import marks_on, quarantined, standing
from truestep.cli import verbs
from truestep.elastic import lifeline
from truestep.runlog.log import read
from truestep.runlog.outbox import FOLDER
from truestep.stages.drill import Trial, Tried, drill, try_restore
from truestep.stages.drills import LIFELINE, Drills
from truestep.storage.store import open_store

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def here(monkeypatch):
    """Processes that are started find what this one finds."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """9 steps on two processes; checkpoints at 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("drilled")
    assert run_job(carry_out, 2, exact(folder)) == ["finished"] * 2
    return folder


@pytest.fixture
def run_dir(done, tmp_path):
    """A copy of that run."""
    shutil.copytree(done / "runs", tmp_path / "runs")
    return tmp_path / "runs" / "small"


def store_of(run_dir: Path):
    return open_store(str(run_dir / "checkpoints" / "base"), {})


def posted(run_dir: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((run_dir / FOLDER).glob("*.json"))]


def in_this_process(run_dir: Path):
    def try_it(trial: Trial) -> Tried:
        found = try_restore(run_dir, Trial(trial.stage, trial.key, 1, trial.steps), [], None)
        assert found is not None
        return found

    return try_it


def damage(run_dir: Path, step: int) -> None:
    """Flip a bit of a data object."""
    block = next(run_dir.glob(f"checkpoints/base/steps/{step:012d}-*/rank-00001.bin"))
    data = bytearray(block.read_bytes())
    data[1000] ^= 1
    block.write_bytes(data)


def drop_newest(run_dir: Path, step: int) -> None:
    """As if the drill had come when this was the newest checkpoint, with the log already ahead of it."""
    for committed in list_committed(store_of(run_dir)):
        if committed.step > step:
            (run_dir / "checkpoints" / "base" / committed.key).unlink()


def test_a_sound_checkpoint_is_read_loaded_elsewhere_and_its_steps_done_again(run_dir):
    drop_newest(run_dir, 6)
    found = drill(run_dir, in_this_process(run_dir), steps=2)
    assert found.ok and (found.step, found.level, found.world, found.steps) == (6, "replay", 1, 2)
    assert "1 process, and 2 steps came out bit for bit" in found.sentence
    store = store_of(run_dir)
    committed = newest(store)
    assert committed is not None
    its = standing(marks_on(store, committed))
    assert its.verified == "replay" and its.drilled is not None and its.drilled.facts["steps"] == 2
    (record,) = posted(run_dir)
    assert record["kind"] == "drill" and record["data"]["ok"] and record["data"]["level"] == "replay"
    assert "drill" not in [r.kind for r in read(run_dir)], "the log has one writer, and that is not the drill"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "options"), [(1, ["--background"]), (3, [])])
def test_the_command_line(run_dir, tmp_path, processes, options):
    drop_newest(run_dir, 6)
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "truestep", "drill", run_dir, "--processes", str(processes), "--json", out]
    subprocess.run([*command, *options], capture_output=True, check=True)
    found = json.loads(out.read_text())
    assert [found[name] for name in ("ok", "step", "level", "world", "steps")] == [True, 6, "replay", processes, 2]
    damage(run_dir, 6)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "is not sound" in done.stdout


def test_drill_of_the_drills_damage_is_quarantined_and_the_next_restart_picks_the_one_before(done, run_dir, tmp_path):
    damage(run_dir, 9)
    found = drill(run_dir, in_this_process(run_dir))
    assert not found.ok and found.level == "scrub" and "damaged" in found.text and found.fault == "checkpoint"
    assert quarantined(store_of(run_dir)) == {found.checkpoint}
    assert [event["kind"] for event in posted(run_dir)] == ["drill", "fault"]
    assert found.checkpoint in posted(run_dir)[1]["data"]["text"]
    assert drill(run_dir, in_this_process(run_dir)).step == 6, "the next drill goes to the one before"

    for file in (run_dir / "models" / "base").iterdir():  # as if the run had been killed before its end
        file.unlink()
    body = exact(done)
    body["run"]["dir"] = str(tmp_path / "runs")
    assert run_job(carry_out, 2, body) == ["finished"] * 2
    records = list(read(run_dir))
    (resumed,) = [r.data for r in records if r.kind == "resume"]
    assert resumed.step == 6 and "quarantined" in resumed.fell_back[0]
    assert [r.kind for r in records].count("drill") == 2, "taken in by the next attempt"
    assert any(r.kind == "fault" and r.data.kind == "checkpoint" for r in records)


def _flip_before_the_hash(rank: int) -> None:
    """Bytes of a moment change between memory and the digests of the blocks, in the save of step 9."""
    real = writer.BlockWriter.write_data

    def write_data(self, plan, planner):
        if self.committed.step == 9 and rank == 0:
            item = next(item for item in plan.items if item.index.fqn.endswith("exp_avg_sq"))
            planner.resolve_data(item).view(writer.torch.int32).view(-1)[0] ^= 1 << 10
        return real(self, plan, planner)

    writer.BlockWriter.write_data = write_data


def test_damage_between_memory_and_hash_is_found_by_loading(tmp_path):
    assert run_job(carry_out, 2, exact(tmp_path), (), _flip_before_the_hash) == ["finished"] * 2
    run_dir = tmp_path / "runs" / "small"
    found = drill(run_dir, in_this_process(run_dir))
    assert not found.ok and found.fault == "checkpoint"
    assert "exp_avg_sq came back with other bits than were in memory at the save" in found.text
    assert len(quarantined(store_of(run_dir))) == 1


def test_steps_that_come_out_otherwise_are_told_but_condemn_no_checkpoint(run_dir):
    drop_newest(run_dir, 6)
    found = drill(run_dir, lambda trial: Tried(1, code=1, sentence="parts at step 7: loss"))
    assert not found.ok and found.fault == "replay" and "parts at step 7" in found.sentence
    assert quarantined(store_of(run_dir)) == set()
    assert [event["data"].get("kind") for event in posted(run_dir)] == [None, "replay"]


def test_a_fault_that_does_not_repeat_is_this_machines(run_dir):
    answers = [Tried(1, damage="a came back with other bits"), Tried(1)]
    with pytest.raises(verbs.UserError, match="two trials went differently"):
        drill(run_dir, lambda trial: answers.pop(0))
    assert quarantined(store_of(run_dir)) == set() and posted(run_dir) == []


def test_one_that_retention_deletes_meanwhile_is_not_called_damaged(run_dir):
    def try_it(trial: Trial) -> Tried:
        (run_dir / "checkpoints" / "base" / trial.key).unlink(missing_ok=True)
        return Tried(1, damage="there is no such file")

    with pytest.raises(verbs.UserError, match="was deleted by retention while it was drilled"):
        drill(run_dir, try_it)
    assert posted(run_dir) == []


def test_a_checkpoint_too_large_for_the_memory_at_hand_is_only_read(run_dir):
    found = drill(run_dir, in_this_process(run_dir), free_bytes=1000.0)
    assert found.ok and found.level == "scrub" and "not loaded" in found.sentence


# Beside a run: processes that stand for a drill.


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def drills_of(run_dir: Path, script: str, clock: Clock, alarms: list[str]) -> Drills:
    """`script` gets the name of the file to write to."""
    command = [sys.executable, "-c", "import json, os, sys, time\n" + textwrap.dedent(script)]
    return Drills(store_of(run_dir), 60.0, clock.now_s, command, alarms.append, clock)


def wait_for_end(beside: Drills, clock: Clock) -> None:
    assert beside.process is not None
    beside.process.wait()
    clock.now_s += 2
    beside.after()


def test_beside_a_run_one_at_a_time_when_due_and_only_for_new_checkpoints(run_dir, monkeypatch):
    clock, alarms = Clock(), list[str]()
    assert lifeline.PIPE == LIFELINE
    script = """
        assert "RANK" not in os.environ and os.environ["OMP_NUM_THREADS"] == "1" and "TRUESTEP_LIFELINE" in os.environ
        json.dump({"sentence": "the checkpoint is not sound"}, open(sys.argv[1], "w"))
        sys.exit(1)
    """
    monkeypatch.setenv("RANK", "0")
    beside = drills_of(run_dir, script, clock, alarms)
    beside.after()
    assert beside.process is None, "not due yet"
    clock.now_s += 61
    beside.after()
    first = beside.process
    assert first is not None
    clock.now_s += 1000
    wait_for_end(beside, clock)
    assert alarms == ["a drill: the checkpoint is not sound"]
    clock.now_s += 61
    beside.after()
    assert beside.process is None, "no checkpoint that was not drilled"
    drop_newest(run_dir, 6)  # so that another one is the newest
    clock.now_s += 61
    beside.after()
    assert beside.process is not None
    beside.close()


def test_a_drill_that_cannot_be_started_ends_no_run_and_is_tried_again(run_dir):
    clock, alarms = Clock(), list[str]()
    beside = drills_of(run_dir, "", clock, alarms)
    command, beside.command = beside.command, ["/there/is/no/such/program"]
    clock.now_s += 61
    beside.after()
    assert beside.process is None and len(alarms) == 1 and alarms[0].startswith("no drill: [Errno 2]")
    beside.command = command
    clock.now_s += 61
    beside.after()
    assert beside.process is not None
    beside.close()


def test_a_drill_ends_with_the_run_and_a_failed_one_is_told(run_dir):
    clock, alarms = Clock(), list[str]()
    beside = drills_of(run_dir, "sys.exit('cannot')", clock, alarms)
    clock.now_s += 61
    beside.after()
    wait_for_end(beside, clock)
    assert alarms == ["a drill could not be carried out (exit code 1): cannot"]

    beside = drills_of(run_dir, "time.sleep(600)", clock, alarms)
    clock.now_s += 61
    beside.after()
    process = beside.process
    assert process is not None and process.poll() is None
    began = time.monotonic()
    beside.close()
    assert process.poll() is not None and time.monotonic() - began < 60
