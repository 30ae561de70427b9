"""Damage to any file of a checkpoint is found before a tensor changes; what does not match is named."""

import hashlib
import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.common import ROWS, assert_same, full_state, one, save_one, shard
from tests.dist import run_ranks
from truestep.checkpoint.catalogue import Committed, begin_epoch, commit, list_committed, newest, read_manifest
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import load, load_newest
from truestep.checkpoint.manifest import Chunk, TensorEntry
from truestep.checkpoint.verify import verify
from truestep.errors import CheckpointError, StorageError
from truestep.storage.local import LocalStore

STATES = {1: full_state(1), 2: full_state(2)}
COMMITTED = Committed(2, 2)


@pytest.fixture
def store(tmp_path):
    """Two checkpoints, each of its own attempt; the newer is to be damaged."""
    store = LocalStore(tmp_path / "store")
    for step, state in STATES.items():
        assert save_one(store, step, state).ok
    return store


def _files(store):
    """The newer checkpoint's commit, manifest and data."""
    return [entry.key for entry in store.list() if re.match(r"(commits|steps)/0*2-", entry.key)]


def _refused(store, committed=COMMITTED):
    """The load raises one sentence and no target changes."""
    target = full_state(99)
    with pytest.raises((CheckpointError, StorageError)) as caught:
        load(store, committed, target)
    assert_same(target, full_state(99))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_c40_a_bit_is_flipped(store):
    key = next(key for key in _files(store) if key.endswith(".bin"))
    path = store.root / key
    data = bytearray(path.read_bytes())
    data[5000] ^= 4
    path.write_bytes(data)
    assert re.search(rf"{key}: bytes 4096 to 5120 of tensor model.embed are not those that were saved", _refused(store))
    (damage,) = verify(store, COMMITTED)
    assert (damage.key, damage.tensor) == (key, "model.embed")


def test_c40_a_byte_is_cut_off(store):
    key = next(key for key in _files(store) if key.endswith(".bin"))
    path = store.root / key
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{key}: ends at byte {size - 1}, but byte {size} is needed" in _refused(store)
    assert [damage.key for damage in verify(store, COMMITTED)] == [key]


def test_c40_no_digest_is_no_excuse(store):
    """A manifest without block digests is refused even if its own SHA-256 is right."""
    entry = TensorEntry((2,), "float32", (Chunk((0,), (2,), "o", 0, 8, 1024, ""),))
    manifest = read_manifest(store, COMMITTED)
    manifest.tensors["model.norm"] = entry
    with pytest.raises(CheckpointError, match=r"model.norm lacks block digests"):
        manifest.check("here")
    store.delete(next(key for key in _files(store) if key.endswith("manifest.json")))
    assert "manifest.json" in _refused(store)


OTHER_SHAPE = r"model.wide is saved as float32 \[3, 130\], but float32 \[130, 3\] is wanted"
OTHER_DTYPE = r"model.norm is saved as float32 \[5\], but float64 \[5\] is wanted"
NO_OPTIMIZER = "optimizer state missing in the checkpoint: optim.more; load weights only if that is meant"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.update({"model.wide": torch.zeros(130, 3)}), OTHER_SHAPE),
        (lambda t: t.update({"model.norm": torch.zeros(5).double()}), OTHER_DTYPE),
        (lambda t: t.pop("model.norm"), "the checkpoint holds what is not wanted here: model.norm"),
        (lambda t: t.update({"model.more": torch.zeros(1)}), "tensors missing in the checkpoint: model.more"),
        (lambda t: t.update({"optim.more": torch.zeros(1)}), NO_OPTIMIZER),
        (lambda t: t.update({"model.norm": torch.zeros(5, device="meta")}), "model.norm is on the meta device"),
    ],
)
def test_c40_what_does_not_match_is_named(store, change, sentence):
    target = full_state(99)
    change(target)
    before = {name: tensor.clone() for name, tensor in target.items()}
    with pytest.raises(CheckpointError, match=sentence):
        load(store, COMMITTED, target)
    assert_same({n: t for n, t in target.items() if not t.is_meta}, {n: t for n, t in before.items() if not t.is_meta})


def test_c40_an_extra_name_is_listed_if_not_strict(store):
    target = full_state(99)
    del target["model.norm"]
    assert load(store, COMMITTED, target, strict=False).unexpected == ["model.norm"]
    assert_same(target, {name: tensor for name, tensor in STATES[2].items() if name != "model.norm"})


def test_damage_to_an_epoch_is_said(store):
    """The record that fences is damaged: nobody guesses which commits count."""
    path = store.root / "epochs" / "000002"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="epochs/000002: the record is damaged"):
        load_newest(store, full_state(99))
    with pytest.raises(CheckpointError, match="epochs/000002: the record is damaged"):
        begin_epoch(store)


def test_old_checkpoint_copied_under_a_newer_name(store):
    """A replayed commit does not become the newest step."""
    shutil.copy(store.root / Committed(1, 1).key, store.root / Committed(3, 2).key)
    assert Committed(3, 2) in list_committed(store)
    assert "holds the commit of step 1, epoch 1; it was swapped" in _refused(store, Committed(3, 2))
    loaded = load_newest(store, full_state(99))
    assert loaded.step == 2 and "it was swapped" in loaded.fell_back[0]


def test_nothing_whole_left(store):
    for step in ("1", "2"):
        for entry in store.list("steps"):
            if entry.key.endswith(".bin") and f"{step}-" in entry.key:
                (store.root / entry.key).write_bytes(b"")
    target = full_state(99)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint can be loaded: passed over .* step 2 .*; passed over .* step 1"
    ):
        load_newest(store, target)
    assert_same(target, full_state(99))


def _damaged_for_one(rank, world, path):
    """Only rank 1 needs the damaged block; both must fall back."""
    targets = shard(full_state(99), (world,), ROWS)
    group = Group.of(dist.distributed_c10d._get_default_store(), rank, world, 20.0)
    with pytest.raises(CheckpointError) as caught:
        load(LocalStore(path), COMMITTED, targets, group=group)
    assert_same(targets, full_state(99))
    loaded = load_newest(LocalStore(path), targets, group=group)
    assert_same(targets, STATES[1])
    assert loaded is not None and loaded.step == 1 and len(loaded.fell_back) == 1
    return str(caught.value)


def test_c40_one_rank_finds_damage_and_all_fall_back(tmp_path):
    store = LocalStore(tmp_path)
    for step, state in STATES.items():
        assert save_one(store, step, state).ok
    embed = read_manifest(store, COMMITTED).tensors["model.embed"].chunks[0]
    path = store.root / embed.object
    data = bytearray(path.read_bytes())
    data[embed.start + embed.num_bytes - 1] ^= 128
    path.write_bytes(data)
    told = run_ranks(_damaged_for_one, 2, tmp_path)
    assert "step 2 was not loaded, because of rank 1" in told[0] and "of tensor model.embed are not those" in told[1]


@pytest.mark.parametrize("chunks", [(), "twice"])
def test_a_committed_manifest_that_does_not_cover_is_refused(store, chunks):
    """Right in every digest, but a rank's part is missing, or there twice: nothing may stay at its random start."""
    manifest = read_manifest(store, COMMITTED)
    norm = manifest.tensors["model.norm"]
    manifest.tensors["model.norm"] = replace(norm, chunks=norm.chunks * 2 if chunks else ())
    data = replace(manifest, step=3).to_bytes()
    store.put("steps/forged.json", data)
    commit(store, Committed(3, 2), "steps/forged.json", hashlib.sha256(data).hexdigest())
    found = f"tensor model.norm is covered by {10 if chunks else 0} of 5 elements"
    assert found in _refused(store, Committed(3, 2))


def test_verify_finds_every_damage(tmp_path):
    store = LocalStore(tmp_path)
    checkpointer = one(store, block_bytes=64)
    checkpointer.save(1, STATES[1], {}, asynchronous=False)
    checkpointer.close()
    committed = newest(store)
    path = store.root / next(iter(read_manifest(store, committed).objects))
    data = bytearray(path.read_bytes())
    for at in (10, 700, len(data) - 1):
        data[at] ^= 1
    path.write_bytes(data + b"junk")
    assert len(verify(store, committed)) == 4
