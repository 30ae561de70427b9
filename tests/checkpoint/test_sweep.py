"""The sweeper: what crashes and superseded attempts left goes, what the live attempt writes and readers need stays."""

import os
import time
import uuid

import obstore
import pytest

from tests.checkpoint.small import Unsynced, assert_whole, tiny_save
from truestep.checkpoint.catalogue import begin_epoch, list_committed
from truestep.checkpoint.marks import mark, marks_of
from truestep.checkpoint.sweep import plan_sweep, sweep
from truestep.errors import StorageError
from truestep.storage.local import LocalStore
from truestep.storage.multipart import list_uploads
from truestep.storage.objects import ObjectStore


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return LocalStore(tmp_path / "store", disk=Unsynced()) if request.param == "folder" else ObjectStore("memory://")


def _half_saved(store, step, epoch, serial=1):
    """Objects of a save that never came to its commit."""
    folder = f"steps/{step:012d}-{epoch:06d}-{serial:04d}"
    store.put(f"{folder}/rank-00000.bin", b"12345678")
    store.put(f"{folder}/rank-00001.bin", b"12345678")
    return folder


def test_orphans_of_older_epochs_go_and_the_live_one_is_left_alone(store):
    kept = tiny_save(store, 10)
    dead = _half_saved(store, 20, 1)
    tried_twice = _half_saved(store, 10, 1, serial=12_345)
    epoch = begin_epoch(store).number
    alive = _half_saved(store, 30, epoch)
    before = {entry.key: store.get(entry.key) for entry in store.list()}
    found = plan_sweep(store)
    assert found.folders == {tried_twice: 16, dead: 16} and found.count == 2 and found.num_bytes == 32
    assert {entry.key: store.get(entry.key) for entry in store.list()} == before, "a plan changes nothing"
    assert sweep(store, found) == 32
    assert {entry.key.rpartition("/")[0] for entry in store.list("steps")} == {
        f"steps/{kept.name}-0001",
        alive,
    }
    assert_whole(store)
    assert plan_sweep(store).count == 0


def test_void_commits_of_a_superseded_attempt_go_with_all_that_is_theirs(store):
    kept = tiny_save(store, 10)
    begin_epoch(store, quarantine=[])
    zombie = tiny_save(store, 20, epoch=2)
    mark(store, zombie, "verified", level="scrub")
    begin_epoch(store, quarantine=[zombie.key])
    assert list_committed(store) == [kept]
    found = plan_sweep(store)
    assert (found.commits, found.marks, list(found.folders)) == ([zombie], [zombie], [f"steps/{zombie.name}-0001"])
    sweep(store, found)
    assert not any(zombie.name in entry.key for entry in store.list() if not entry.key.startswith("epochs/"))
    assert_whole(store)
    assert list_committed(store) == [kept] and plan_sweep(store).count == 0


def test_a_quarantined_checkpoint_is_no_orphan(store):
    made = tiny_save(store, 10)
    mark(store, made, "quarantined", reason="a test")
    begin_epoch(store)
    assert plan_sweep(store).count == 0


def test_folders_of_a_damaged_commit_stay(store):
    made = tiny_save(store, 10)
    _half_saved(store, 10, 1, serial=2)
    begin_epoch(store)
    store.delete(made.key)
    store.put(made.key, b"damaged")
    found = plan_sweep(store)
    assert found.folders == {} and "damaged" in found.notes[0]


def test_marks_of_commits_that_are_gone(store):
    made = tiny_save(store, 10)
    begin_epoch(store)
    mark(store, made, "deleting", done=True)
    store.delete(made.key)
    assert plan_sweep(store).marks == [], "the newest epoch still names it"
    begin_epoch(store)
    found = plan_sweep(store)
    assert found.marks == [made] and len(found.folders) == 1
    sweep(store, found)
    assert marks_of(store) == {}


def test_temporary_files_of_dead_writers(tmp_path):
    store = LocalStore(tmp_path)
    made = tiny_save(store, 10)
    folder = tmp_path / "steps" / f"{made.name}-0001"
    dead, alive = folder / ".tmp-dead", folder / ".tmp-alive"
    dead.write_bytes(b"12345")
    alive.write_bytes(b"123")
    hours_ago = time.time() - 30 * 3600
    os.utime(dead, (hours_ago, hours_ago))
    found = plan_sweep(store)
    assert found.temporaries == {f"steps/{made.name}-0001/.tmp-dead": 5}
    assert sweep(store, found) == 5
    assert not dead.exists() and alive.exists()
    assert_whole(store)


@pytest.mark.s3
def test_unfinished_uploads_in_a_real_bucket(seaweed):
    store = ObjectStore(f"{seaweed.url}/{uuid.uuid4().hex}/base", seaweed.options)
    other = ObjectStore(f"{seaweed.url}/{uuid.uuid4().hex}", seaweed.options)
    tiny_save(store, 10)
    for each in (store, other):
        writer = obstore.open_writer(each.backend, "steps/half & more.bin", buffer_size=5 << 20)
        writer.write(bytes(6 << 20))
        writer.flush()
        del writer  # as a killed process does: neither finished nor aborted
    (upload,) = list_uploads(store)
    assert upload.key == "steps/half & more.bin" and abs(time.time() - upload.began_s) < 120
    assert plan_sweep(store).uploads == [], "it is young, so its writer may be alive"
    found = plan_sweep(store, older_s=0.0)
    assert found.uploads == [upload] and found.notes == []
    sweep(store, found)
    assert list_uploads(store) == [] and len(list_uploads(other)) == 1
    assert_whole(store)


@pytest.mark.s3
def test_where_uploads_cannot_be_listed_a_rule_is_advised(seaweed, monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    wrong = ObjectStore(f"{seaweed.url}/x", {**seaweed.options, "secret_access_key": "wrong"})
    with pytest.raises(StorageError, match="status 403"):
        list_uploads(wrong)
    options = {k: v for k, v in seaweed.options.items() if "access_key" not in k}
    with pytest.raises(StorageError, match="no access key"):
        list_uploads(ObjectStore(f"{seaweed.url}/x", options))


def test_only_s3_has_uploads():
    assert "lifecycle rule" in plan_sweep(ObjectStore("memory://")).notes[0]
