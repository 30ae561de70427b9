"""`truestep checkpoints`: what it shows, marks, deletes and refuses, on a run directory and on a bucket's store."""

from contextlib import closing

import pytest

from tests.checkpoint.small import spoil, tiny_save
from tests.refusals import files, truestep
from tests.small_run import recipe
from truestep.checkpoint.catalogue import begin_epoch, list_committed, newest, read_commit
from truestep.checkpoint.marks import mark, quarantined
from truestep.recipe.load import load
from truestep.runlog.log import RunLog
from truestep.stages.context import open_run
from truestep.storage.local import LocalStore

START = {"run": "small", "world": 1, "host": "here", "digests": {}, "versions": {}, "devices": {}, "stages": ["base"]}


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints of one attempt, and its log."""
    body = recipe(tmp_path)
    body["checkpoint"] |= {"keep": 1, "disk": str(tmp_path / "disk")}
    made = load(body)
    open_run(made)
    run_dir = tmp_path / "runs" / "small"
    store = LocalStore(run_dir / "checkpoints" / "base")
    epoch = begin_epoch(store).number
    with closing(RunLog(run_dir, 1)) as log:
        log.append("attempt_start", **START)
        for step in (10, 20, 30):
            committed = tiny_save(store, step, epoch)
            sha256 = read_commit(store, committed).sha256
            log.append("save", stage="base", step=step, ok=True, stall_s=0.1, total_s=0.1, manifest=sha256)
    return run_dir


@pytest.fixture
def store(run):
    return LocalStore(run / "checkpoints" / "base")


def test_list(run, store, capsys, tmp_path):
    made = list_committed(store)
    mark(store, made[0], "pinned")
    mark(store, made[1], "quarantined", reason="a drill found damage")
    mark(store, made[2], "drilled", level="replay")
    folder = read_commit(store, made[2]).manifest.rpartition("/")[0]
    LocalStore(tmp_path / "disk" / "small" / "base").put(f"{folder}/rank-00000.bin", b"copy")
    done = truestep(capsys, "checkpoints", "list", run)
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines() if line.strip()[:2] in ("10", "20", "30")]
    assert [line[0] for line in lines] == ["30", "20", "10"]
    text = done.out
    assert "replay" in text and "pinned" in text and "quarantined" in text and "disk, store" in text
    assert "not recorded" not in text and "not" not in lines[0]


def test_a_lost_checkpoint_is_exit_code_2(run, store, capsys):
    begin_epoch(store)
    made = list_committed(store)
    store.delete(made[1].key)
    truestep(capsys, "checkpoints", "list", run).refused("is listed but gone", made[1].key)


def test_verify_marks_and_finds_damage(run, store, capsys):
    assert truestep(capsys, "checkpoints", "verify", run, "--step", "10").code == 0
    key = spoil(store, list_committed(store)[2])
    done = truestep(capsys, "checkpoints", "verify", run)
    done.refused(key, "damaged")
    assert "step 20 (epoch 1): every byte as saved" in done.out and "step 30 (epoch 1): 1 damaged" in done.out
    assert quarantined(store) == {list_committed(store)[2].key} and newest(store).step == 20
    assert truestep(capsys, "checkpoints", "release", run, "30").code == 0
    assert newest(store).step == 30


def test_pin_and_prune(run, store, capsys):
    assert truestep(capsys, "checkpoints", "pin", run, "10", "--reason", "a paper").code == 0
    truestep(capsys, "checkpoints", "verify", run)
    before = files(run)
    dry = truestep(capsys, "checkpoints", "prune", run, "--dry-run")
    assert dry.code == 0 and dry.out.count("to be deleted") == 1 and "kept: it is pinned" in dry.out
    assert files(run) == before
    done = truestep(capsys, "checkpoints", "prune", run)
    assert done.code == 0 and "deleted 1, freed" in done.out
    assert [c.step for c in list_committed(store)] == [10, 30]
    truestep(capsys, "checkpoints", "unpin", run, "10")
    truestep(capsys, "checkpoints", "prune", run)
    assert [c.step for c in list_committed(store)] == [30]


def test_what_a_person_writes_is_shown_as_it_is(run, store, capsys):
    reason = "see [/notes] of [bold]"
    done = truestep(capsys, "checkpoints", "quarantine", run, "10", "--reason", reason)
    assert done.code == 0 and f"base step 10 is quarantined: {reason}" in done.out
    assert newest(store).step == 30 and "[/notes] of [bold]" in truestep(capsys, "checkpoints", "list", run).out


def test_prune_leaves_what_the_run_went_on_from(run, store, capsys):
    truestep(capsys, "checkpoints", "verify", run)
    with closing(RunLog(run, 2)) as log:
        log.append("attempt_start", **START)
        log.append("resume", stage="base", step=10, checkpoint=list_committed(store)[0].key)
        log.append("decision", stage="base", action="roll back", reason="a test", to_step=20)
    truestep(capsys, "checkpoints", "prune", run)
    assert [c.step for c in list_committed(store)] == [10, 20, 30]


def test_sweep(run, store, capsys):
    store.put("steps/000000000040-000001-0009/rank-00000.bin", b"12345678")
    assert "removed 0 things" in truestep(capsys, "checkpoints", "sweep", run).out
    begin_epoch(store)
    dry = truestep(capsys, "checkpoints", "sweep", run, "--dry-run")
    assert "steps/000000000040-000001-0009: 8 B without a commit" in dry.out and "would remove 1 things" in dry.out
    assert "removed 1 things" in truestep(capsys, "checkpoints", "sweep", run).out
    assert store.list("steps/000000000040-000001-0009") == []


def test_what_is_refused(run, capsys, tmp_path):
    truestep(capsys, "checkpoints", "list", tmp_path).refused("run.json", "give the directory of a run")
    truestep(capsys, "checkpoints", "list", run, "--stage", "other").refused("no stage 'other'", "base")
    truestep(capsys, "checkpoints", "pin", run, "11").refused("no checkpoint of step 11", "10, 20, 30")
    truestep(capsys, "checkpoints", "sweep", run, "--older", "soon").refused("--older")
    done = truestep(capsys, "checkpoints", "prune", run, "--keep-every", "-5")
    assert done.code == 2 and "'--keep-every'" in done.err
