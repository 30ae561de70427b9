"""Short checks of one thing each, which must fail once the source is without what they look at. All in one folder."""

import hashlib
from dataclasses import replace

import pytest
import torch

from tests.checkpoint import (
    test_commit,
    test_damage,
    test_fire_damage,
    test_fire_disk,
    test_fire_faults,
    test_fire_fencing,
    test_retention,
    test_save,
)
from tests.checkpoint.attempts import attempt, blank, check
from tests.checkpoint.common import many, one, save_one
from tests.checkpoint.memory import MemoryStore
from tests.dist import run_ranks
from truestep.checkpoint.catalogue import Committed, begin_epoch, commit, read_commit, read_manifest
from truestep.checkpoint.load import Mismatch, load, load_newest
from truestep.checkpoint.manifest import Chunk, Manifest, TensorEntry, describe_object
from truestep.errors import CheckpointError, StorageError
from truestep.numerics.pieces import Piece
from truestep.storage.interface import KeyExists
from truestep.storage.local import LocalStore


def power_cuts_after_kills(folder):
    for k in test_fire_disk.new_folders(folder / "undisturbed"):
        test_fire_disk.killed_then_cut(folder / str(k), k)


def undurable(folder):
    test_fire_faults.test_a_name_that_may_not_survive_is_no_success(folder)


def taken_name(folder):
    store = LocalStore(folder)
    store.create("a", b"first")
    with pytest.raises(KeyExists):
        store.create("a", b"second")
    assert store.get("a") == b"first"


def begin_at_once(folder):
    test_commit.test_two_attempts_that_begin_at_once(folder, "fence to be created")


def saved_again(folder):
    """A step whose first save failed just before its commit."""
    store = LocalStore(folder)
    checkpointer = one(store)

    def event(name):
        if name == "commit to be created":
            store.event = lambda name: None
            raise OSError(5, "once")

    store.event = event
    assert not checkpointer.save(1, {"w": torch.ones(1)}, {}, asynchronous=False).result().ok
    saved = checkpointer.save(1, {"w": torch.ones(1)}, {}, asynchronous=False).result()
    assert saved.ok, saved.error


def resumes(folder):
    store = MemoryStore()
    for step in range(1, 12):
        resumed, (saved,) = attempt(store, [step])
        assert resumed == (step - 1 or None) and saved.ok
    check(store, set(range(1, 12)))


def late_lists(folder):
    objects = test_fire_faults._base()
    before = dict(objects)
    assert attempt(MemoryStore(objects), [2])[1][0].ok
    assert attempt(test_fire_faults.Stale(objects, before, {3}), [3])[0] == 2


def zombie(folder):
    """Stopped after its copy was taken, before it wrote anything."""
    names = test_fire_fencing._undisturbed(folder / "undisturbed")
    (_, (saved,)), counts = test_fire_fencing.try_zombie(folder / "run", names.index("staged") + 1)
    assert not saved.ok and not counts


def hung_before_commit(folder):
    test_fire_faults.test_a_save_that_hangs_before_its_commit_never_commits(folder)


def hung_write(folder):
    test_fire_faults.test_a_write_that_hangs_is_given_up_and_never_commits(folder, True)


def damaged(folder):
    test_fire_damage.sweep(test_fire_damage.three_steps(), 1)


def manifest_of_another_step(folder):
    """Right in every digest."""
    store = MemoryStore()
    assert attempt(store, [1])[1][0].ok
    record = read_commit(store, Committed(1, 1))
    commit(store, Committed(2, 1), record.manifest, record.sha256)
    with pytest.raises(CheckpointError, match="it was swapped"):
        load(store, Committed(2, 1), blank())


def uncovered(folder):
    """Right in every digest, but no rank wrote a tensor."""
    store = MemoryStore()
    assert attempt(store, [1])[1][0].ok
    manifest = read_manifest(store, Committed(1, 1))
    manifest.tensors["optim.step"] = replace(manifest.tensors["optim.step"], chunks=())
    data = replace(manifest, step=2).to_bytes()
    store.put("steps/forged.json", data)
    commit(store, Committed(2, 1), "steps/forged.json", hashlib.sha256(data).hexdigest())
    with pytest.raises(CheckpointError, match=r"tensor optim.step is covered by 0 of 1 elements"):
        load(store, Committed(2, 1), blank())


def gap(folder):
    chunk = Chunk((0,), (2,), "o", 0, 8, 1024, "0" * 16)
    assert describe_object([chunk, replace(chunk, start=16)]) is None


def no_digests(folder):
    entry = TensorEntry((2,), "float32", (Chunk((0,), (2,), "o", 0, 8, 1024, ""),))
    with pytest.raises(CheckpointError, match="lacks block digests"):
        Manifest(1, 1, {"w": entry}, objects={"o": describe_object([*entry.chunks])}).check("here")


def nothing_whole(folder):
    store = MemoryStore()
    assert attempt(store, [1])[1][0].ok
    store.objects |= {key: b"" for key in store.objects if key.endswith(".bin")}
    with pytest.raises(CheckpointError, match="no checkpoint can be loaded"):
        load_newest(store, blank())


def gone(folder):
    """The newest commit was taken away; what it was made of is still there."""
    store = MemoryStore()
    for step in (1, 2):
        assert attempt(store, [step])[1][0].ok
    store.delete(Committed(2, 2).key)
    loaded = load_newest(store, blank())
    assert loaded is not None and loaded.step == 1 and "commits/000000000002-000002 is gone" in loaded.fell_back[0]


def other_shape(folder):
    _refuses({"model.w": torch.zeros(3, 2)})


def missing_name(folder):
    _refuses({"model.w": torch.zeros(2, 3), "model.more": torch.zeros(1)})


def _refuses(target):
    store = MemoryStore()
    assert save_one(store, 1, {"model.w": torch.ones(2, 3)}).ok
    with pytest.raises(Mismatch):
        load_newest(store, target)


def damage_on_one_rank(folder):
    test_damage.test_c40_one_rank_finds_damage_and_all_fall_back(folder)


def object_cut(folder):
    test_save.test_an_object_that_is_not_there_whole_is_not_committed(folder, 100)


def unowned(folder):
    checkpointer = one(MemoryStore())
    tensors = {"w": Piece(torch.ones(2), (2,), (0,), owned=False)}
    saved = checkpointer.save(1, tensors, {}, asynchronous=False).result()
    assert not saved.ok and "w is covered by 0 of 2 elements" in saved.error


def _tied(rank, world, path):
    checkpointer = many(LocalStore(path), rank, world, deadline_s=3.0)
    a, b = torch.ones(2), torch.zeros(2)
    saved = checkpointer.save(1, {"a": a, "b": a if rank == 0 else b}, {}, asynchronous=False).result()
    checkpointer.close()
    return saved


def tied_on_one_rank(folder):
    begin_epoch(LocalStore(folder))
    for saved in run_ranks(_tied, 2, folder):
        assert not saved.ok and "b: rank 1 holds it apart, another rank ties it to a tensor" in saved.error


class _Lax(MemoryStore):
    def create(self, key, data):
        self.put(key, data)


def lax_store(folder):
    with pytest.raises(StorageError, match="cannot commit a checkpoint safely, because it overwrites"):
        begin_epoch(_Lax())


def folder_of_another(folder):
    test_retention.test_a_commit_that_names_anothers_folder_deletes_nothing_of_it(LocalStore(folder))


def pinned_meanwhile(folder):
    test_retention.test_pin_and_delete_at_once_one_sees_the_other(folder)
