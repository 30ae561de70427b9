"""Places that are full, forbidden, gone, lax or damaged: what is said, what is left, and that the run can go on."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import small_run
from tests.refusals import BEGUN, TOKENIZER, files, holds_only, last_word, truestep, write_recipe
from tests.stages.test_run import stop_after
from truestep.checkpoint.catalogue import list_committed
from truestep.checkpoint.verify import verify as verify_checkpoint
from truestep.cli import verbs
from truestep.runlog.log import read
from truestep.runlog.log import verify as verify_log
from truestep.storage.local import LocalStore
from truestep.storage.objects import RETRIES


def _mounts() -> str:
    """Why no file system can be mounted here, or nothing."""
    if os.geteuid() != 0:
        return "only root may mount a small file system"
    found = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    return found.stderr.strip()


REASON = _mounts()
mounts = pytest.mark.skipif(bool(REASON), reason=f"NOT TESTED: full and read-only disks ({REASON})")


@contextmanager
def disk(folder: Path, size: str, *, read_only: bool = False) -> Iterator[Path]:
    """A file system of its own at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size}" + (",ro" if read_only else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Fill the disk up with one file, but for `leave` bytes."""
    ballast = folder / "ballast"
    space = os.statvfs(folder)
    with ballast.open("wb") as out:
        out.write(bytes(max(0, space.f_bavail * space.f_frsize - leave)))
    return ballast


def resized(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def sound_checkpoints(place: Path) -> list[int]:
    """Steps of all committed checkpoints, every byte of which was verified; nothing half-written lies beside them."""
    store = LocalStore(place)
    committed = list_committed(store)
    assert not [damage for one in committed for damage in verify_checkpoint(store, one)]
    assert not [path for path in place.rglob("*") if path.name.startswith(".tmp")]
    return [one.step for one in committed]


# Full disks.


@mounts
def test_full_disk_for_the_run_directory(capsys, tmp_path):
    file = write_recipe(tmp_path, small_run.recipe(tmp_path))
    with disk(tmp_path / "runs", "128k") as runs:
        ballast = fill(runs)
        truestep(capsys, "run", file).refused("small cannot be written", "No space left", "free space")
        assert [path.name for path in runs.rglob("*")] == ["ballast"]
        ballast.unlink()


@mounts
def test_full_disk_in_the_data_build(capsys, tmp_path):
    file = write_recipe(tmp_path, small_run.recipe(tmp_path))
    with disk(tmp_path / "runs", "1m") as runs:
        ballast = fill(runs, leave=48 * 1024)
        said = truestep(capsys, "run", file).refused(".data/train-", "No space left", "free space")
        assert said == f"truestep: {last_word(runs / 'small')}\n"
        holds_only(runs, [*BEGUN, *TOKENIZER, "ballast"])
        ballast.unlink()
        resized(runs, "8m")
        assert truestep(capsys, "run", file).code == 0


@mounts
def test_full_disk_for_checkpoints(capsys, tmp_path):
    """Training goes on while saves fail, and says so each time; the last one is tried twice, and must succeed."""
    body = small_run.recipe(tmp_path)
    body["checkpoint"] |= {"url": str(tmp_path / "saved")}
    file, run_dir = write_recipe(tmp_path, body), tmp_path / "runs" / "small"
    with disk(tmp_path / "saved", "700k") as saved:
        ended = truestep(capsys, "run", file)
        ended.refused("saving step 20 failed", "no space is left", "goes on from the newest good checkpoint")
        alarms = " ".join(ended.out.split()).split("WARNING")[1:]
        steps = sound_checkpoints(saved / "small" / "base")
        assert steps == [5] and len(alarms) == 4 and all("no space is left" in alarm for alarm in alarms)
        saves = [record.data for record in read(run_dir) if record.kind == "save"]
        assert [(save.step, save.ok) for save in saves] == [
            (5, True),
            (10, False),
            (15, False),
            (20, False),
            (20, False),
        ]
        assert not (run_dir / "models").exists()
        resized(saved, "8m")
        ended = truestep(capsys, "run", file)
        assert ended.code == 0 and "goes on from step 5" in ended.out
        assert sound_checkpoints(saved / "small" / "base")[0] == 5


@mounts
def test_full_disk_for_the_run_log(capsys, tmp_path):
    """A record is written whole or not at all, so the log stays sound and the run goes on where it was saved."""
    body = small_run.recipe(tmp_path)
    body["checkpoint"] |= {"url": str(tmp_path / "saved")}
    file, log = write_recipe(tmp_path, body), tmp_path / "runs" / "small" / "log"
    with disk(log, "20k"):
        ended = truestep(capsys, "run", file)
        ended.refused("cannot write", str(log), "No space left", "free space there, then run again")
        records = verify_log(log.parent)
        assert records.records > 5 and not records.remarks
        assert all(step in (5, 10, 15, 20) for step in sound_checkpoints(tmp_path / "saved" / "small" / "base"))
        resized(log, "8m")
        assert truestep(capsys, "run", file).code == 0
        verify_log(log.parent)


@mounts
def test_full_disk_for_the_model(capsys, tmp_path):
    file, run_dir = write_recipe(tmp_path, small_run.recipe(tmp_path)), tmp_path / "runs" / "small"
    with disk(tmp_path / "models", "64k") as small:
        truestep(capsys, "run", file, "--set", "run.resume=required").refused("run.resume is required")
        (run_dir / "models").symlink_to(small)
        truestep(capsys, "run", file).refused(
            "models/base cannot be written", "o space left", "give a folder with room"
        )
        assert not list(small.iterdir())
        assert sound_checkpoints(run_dir / "checkpoints" / "base") == [5, 10, 15, 20]
        resized(small, "8m")
        ended = truestep(capsys, "run", file)
        assert ended.code == 0 and "goes on from step 20" in ended.out


# No permission. Modes do not bind root, so: read-only disks, and paths below a file.


@mounts
@pytest.mark.parametrize("processes", [1, 2])
def test_read_only_run_directory(processes, capsys, tmp_path):
    file = write_recipe(tmp_path, small_run.with_machine(small_run.recipe(tmp_path), processes=processes))
    with disk(tmp_path / "runs", "1m", read_only=True) as runs:
        truestep(capsys, "run", file).refused("cannot be written", "Read-only file system", "another")
        assert not list(runs.iterdir())


@mounts
def test_read_only_checkpoints(capsys, tmp_path):
    body = small_run.recipe(tmp_path)
    body["checkpoint"] |= {"url": str(tmp_path / "saved")}
    file = write_recipe(tmp_path, body)
    with disk(tmp_path / "saved", "1m", read_only=True) as saved:
        truestep(capsys, "run", file).refused("cannot write", "read-only", "name another place")
        assert not list(saved.iterdir()) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_run_directory_below_a_file(processes, capsys, tmp_path):
    file = write_recipe(tmp_path, small_run.with_machine(small_run.recipe(tmp_path), processes=processes))
    (tmp_path / "runs").write_text("no folder")
    truestep(capsys, "run", file).refused("runs", "cannot be written", "another")
    assert (tmp_path / "runs").read_text() == "no folder"


def test_checkpoints_below_a_file(capsys, tmp_path):
    body = small_run.recipe(tmp_path)
    (tmp_path / "saved").write_text("no folder")
    body["checkpoint"] |= {"url": str(tmp_path / "saved" / "here")}
    truestep(capsys, "run", write_recipe(tmp_path, body)).refused("saved/here", "is a file", "name another place")
    assert not (tmp_path / "runs").exists()


# Object stores.


def on_s3(folder: Path, url: str, options: dict[str, str]) -> Path:
    body = small_run.recipe(folder)
    shown = {name: value for name, value in options.items() if name not in ("access_key_id", "secret_access_key")}
    body["checkpoint"] |= {"url": f"{url}/{folder.name}", "storage_options": shown}
    return write_recipe(folder, body)


def test_wrong_s3_credentials(capsys, tmp_path, seaweed, monkeypatch):
    file = on_s3(tmp_path, seaweed.url, seaweed.options)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "right")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    truestep(capsys, "run", file).refused("s3://ckpt", "wrong credentials", "correct those in the environment")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    truestep(capsys, "run", file).refused("s3://ckpt", "redentials", "environment")
    assert not (tmp_path / "runs").exists()


def test_s3_bucket_that_is_not_there(capsys, tmp_path, seaweed, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "right")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "right-secret")
    file = on_s3(tmp_path, "s3://no-such-bucket", seaweed.options)
    truestep(capsys, "run", file).refused("s3://no-such-bucket", "no such bucket", "create it or correct the URL")
    assert not (tmp_path / "runs").exists()


def test_s3_server_that_is_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(RETRIES, "max_retries", 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "right")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "right-secret")
    options = {"endpoint": "http://127.0.0.1:9", "region": "us-east-1", "allow_http": "true"}
    truestep(capsys, "run", on_s3(tmp_path, "s3://ckpt", options)).refused("cannot be reached", "check the endpoint")
    assert not (tmp_path / "runs").exists()


def test_s3_store_that_cannot_commit_is_refused(capsys, tmp_path, rclone, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "right")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "right-secret")
    file = on_s3(tmp_path, rclone.url, rclone.options)
    truestep(capsys, "run", file).refused("cannot commit a checkpoint safely", "overwrites", "use another store")
    assert not (tmp_path / "runs").exists()


# Damage.


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run with checkpoints of steps 5 and 8, stopped politely."""
    folder = tmp_path_factory.mktemp("stopped")
    file, patch = write_recipe(folder, small_run.recipe(folder)), pytest.MonkeyPatch()
    stop_after(patch, 8)
    assert verbs.run(file).reason == "stopped"
    patch.undo()
    return folder


@pytest.fixture
def copy(stopped, tmp_path):
    """A copy of it, recipe and all."""
    shutil.copytree(stopped / "runs", tmp_path / "runs")
    body = small_run.recipe(stopped)
    body["run"] |= {"dir": str(tmp_path / "runs")}
    return write_recipe(tmp_path, body)


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "truncated":
        del data[-100:]
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone"])
@pytest.mark.parametrize("what", ["rank-00000.bin", "manifest.json"])
def test_damaged_checkpoint_is_passed_over_loudly(what, how, capsys, copy, tmp_path, monkeypatch):
    place = tmp_path / "runs" / "small" / "checkpoints" / "base"
    stop_after(monkeypatch, 6)
    (newest,) = place.glob(f"steps/*8-*/{what}")
    damage(newest, how)
    ended = truestep(capsys, "run", copy)
    said = " ".join(ended.out.split())
    assert ended.code == 0 and not ended.err
    assert "WARNING passed over the checkpoint of step 8" in said and "goes on from step 5" in said
    resumed = next(r.data for r in read(tmp_path / "runs" / "small") if r.kind == "resume")
    assert resumed.step == 5 and "step 8" in resumed.fell_back[0]


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_no_checkpoint_left_is_refused_and_nothing_is_trained_anew(how, capsys, copy, tmp_path):
    run_dir = tmp_path / "runs" / "small"
    for file in run_dir.glob("checkpoints/base/steps/*/rank-00000.bin"):
        damage(file, how)
    before = files(run_dir / "checkpoints" / "base" / "steps")
    truestep(capsys, "run", copy).refused("no checkpoint can be loaded", "step 8", "step 5")
    assert files(run_dir / "checkpoints" / "base" / "steps") == before
    assert "no checkpoint can be loaded" in last_word(run_dir)
    assert not [r for r in read(run_dir) if r.kind == "step" and r.attempt == 2]


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone"])
def test_damaged_token_store(how, capsys, copy, tmp_path):
    """A changed byte is found when its block is first read, a missing one when the store is opened."""
    (tokens,) = (tmp_path / "runs").glob(".data/train-*/tokens.bin")
    damage(tokens, how)
    run_dir = tmp_path / "runs" / "small"
    before = files(run_dir / "checkpoints")
    truestep(capsys, "run", copy).refused("train-", "tokens.bin", "remove its folder and build")
    assert "tokens.bin" in last_word(run_dir)
    after = files(run_dir / "checkpoints")
    assert before.items() <= after.items() and sound_checkpoints(run_dir / "checkpoints" / "base") == [5, 8]
    shutil.rmtree(tokens.parent)
    assert truestep(capsys, "run", copy).code == 0


def test_altered_log(capsys, copy, tmp_path):
    (log,) = (tmp_path / "runs" / "small" / "log").glob("events-*.jsonl")
    log.write_bytes(log.read_bytes().replace(b'"kind":"step"', b'"kind":"stop"', 1))
    before = files(tmp_path / "runs")
    truestep(capsys, "run", copy).refused("line", "hash chain breaks here", "restore the log")
    assert files(tmp_path / "runs") == before
    truestep(capsys, "status", tmp_path / "runs" / "small").refused("hash chain breaks here")
