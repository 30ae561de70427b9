"""Copies nearby: written beside the durable objects, read first, and never able to spoil a load or a save."""

import threading

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.common import assert_same, full_state, one
from tests.dist import run_ranks
from truestep.checkpoint import places as places_module
from truestep.checkpoint.catalogue import Committed, begin_epoch, list_committed, newest
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import load_newest
from truestep.checkpoint.places import Place, Places, newest_first
from truestep.checkpoint.upkeep import verify_and_mark
from truestep.elastic.keeper import Keeper, KeeperServer
from truestep.errors import CheckpointError, StorageError
from truestep.storage.keeper import KeeperStore
from truestep.storage.local import LocalStore

GONE = KeeperStore("127.0.0.1:9", "secret", "run/base")  # the discard port: nobody listens


@pytest.fixture
def keeper():
    with KeeperServer("127.0.0.1", "secret", 64 << 20) as made:
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield KeeperStore(made.address, "secret", "run/base")
        made.shutdown()


@pytest.fixture
def near(keeper, tmp_path):
    return [Place("memory", keeper), Place("disk", LocalStore(tmp_path / "disk"))]


def _save(store, steps, checkpointer=None):
    checkpointer = checkpointer or one(store)
    for step in steps:
        result = checkpointer.save(step, full_state(step), {"step": step}, asynchronous=True).result()
        assert result.ok, result.error
    checkpointer.close()


def _load(store):
    target = full_state(99)
    loaded = load_newest(store, target)
    assert loaded is not None
    assert_same(target, full_state(loaded.step))
    return loaded


def _spoil(store, how):
    """Damage every object of a nearer place."""
    for entry in store.list("steps"):
        data = bytearray(store.get(entry.key))
        store.delete(entry.key)
        if how == "flip":
            data[len(data) // 2] ^= 4
        if how == "short":
            del data[-1]
        if how != "delete":
            store.put(entry.key, bytes(data))


def test_copies_have_the_same_keys_and_bytes(near, tmp_path):
    durable, alarms = LocalStore(tmp_path / "durable"), []
    _save(Places(durable, near, near, alarms.append), [1])
    data = {e.key: durable.get(e.key) for e in durable.list("steps") if e.key.endswith(".bin")}
    assert data and alarms == []
    for place in near:
        assert {e.key: place.store.get(e.key) for e in place.store.list()} == data, place.name


@pytest.mark.parametrize("nearest", [0, 1])
def test_the_nearest_is_read_and_counted(near, tmp_path, nearest):
    durable, alarms = LocalStore(tmp_path / "durable"), []
    _save(Places(durable, near, near, alarms.append), [1])
    reads = near[nearest:] + near[:nearest]
    loaded = _load(Places(durable, [], reads, alarms.append))
    assert loaded.places == {reads[0].name: loaded.bytes_read} and alarms == [] and loaded.fell_back == []


@pytest.mark.parametrize("how", ["flip", "short", "delete"])
def test_a_bad_copy_never_spoils_a_load(near, tmp_path, how):
    durable, alarms = LocalStore(tmp_path / "durable"), []
    store = Places(durable, near, near, alarms.append)
    _save(store, [1])
    _spoil(near[0].store, how)
    loaded = _load(store)
    assert loaded.places["disk"] > 0 and "store" not in loaded.places and loaded.fell_back == []
    _spoil(near[1].store, how)
    loaded = _load(store)
    assert loaded.places["store"] > 0 and loaded.fell_back == []
    if how == "delete":
        assert alarms == [] and loaded.places == {"store": loaded.bytes_read}
    else:
        (key,) = {e.key for e in durable.list("steps") if e.key.endswith(".bin")}
        assert len(alarms) == 3, "each copy once a load"
        assert all(key in text and "the next place is asked" in text for text in alarms)
        assert "memory" in alarms[0] and "disk" in alarms[2]


def test_only_damaged_ranges_come_from_further_away(near, tmp_path):
    durable, alarms = LocalStore(tmp_path / "durable"), []
    durable.request_bytes = 1024
    store = Places(durable, near[:1], near[:1], alarms.append)
    _save(store, [1])
    _spoil(near[0].store, "flip")
    loaded = _load(store)
    assert 0 < loaded.places["store"] < loaded.places["memory"] and len(alarms) == 1
    assert sum(loaded.places.values()) == loaded.bytes_read


def test_damage_everywhere_is_damage(near, tmp_path):
    durable, alarms = LocalStore(tmp_path / "durable"), []
    store = Places(durable, near, near, alarms.append)
    _save(store, [1])
    for each in (durable, near[0].store, near[1].store):
        for entry in each.list("steps"):
            if entry.key.endswith(".bin"):
                each.delete(entry.key)
                each.put(entry.key, bytes(entry.size))
    with pytest.raises(CheckpointError, match=str(tmp_path / "durable")):
        load_newest(store, full_state(99))


def test_a_place_that_fails_is_an_alarm_and_no_failed_save(near, tmp_path):
    durable, alarms = LocalStore(tmp_path / "durable"), []
    (tmp_path / "file").write_text("no folder")
    broken = [Place("memory", GONE), Place("disk", LocalStore(tmp_path / "file"))]
    _save(Places(durable, broken, broken, alarms.append), [1])
    assert len(alarms) == 2 and "no copy in memory" in alarms[0] and "no copy in disk" in alarms[1]
    loaded = _load(Places(durable, broken, broken, alarms.append))
    assert loaded.places == {"store": loaded.bytes_read}
    assert "no checkpoint can be read from memory: " in alarms[2] and "from disk" in alarms[3] and len(alarms) == 4


def test_whatever_fails_in_a_place_is_an_alarm(near, tmp_path, monkeypatch):
    def fail(key, parts, size):
        raise RuntimeError

    monkeypatch.setattr(near[1].store, "put_parts", fail)
    alarms = []
    _save(Places(LocalStore(tmp_path / "durable"), near[1:], near[1:], alarms.append), [1])
    assert len(alarms) == 1 and "no copy in disk: RuntimeError" in alarms[0]


def test_older_copies_that_cannot_be_removed_are_an_alarm(near, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(places_module.shutil, "rmtree", refuse)
    alarms = []
    _save(Places(LocalStore(tmp_path / "durable"), near[1:], near[1:], alarms.append), [1, 2, 3])
    assert len(alarms) == 1 and "older copies in disk cannot be removed" in alarms[0]


def test_a_place_that_hangs_is_left_behind(near, tmp_path, monkeypatch):
    monkeypatch.setattr(places_module, "PATIENCE_S", 0.2)
    durable, alarms, hold = LocalStore(tmp_path / "durable"), [], threading.Event()
    put_parts = near[1].store.put_parts

    def stuck(key, parts, size):
        assert hold.wait(20)
        return put_parts(key, parts, size)

    monkeypatch.setattr(near[1].store, "put_parts", stuck)
    store = Places(durable, near[1:], near[1:], alarms.append)
    _save(store, [1])
    assert len(alarms) == 1 and "no copy in disk: no answer within 0.2 s" in alarms[0]
    hold.set()
    for thread in threading.enumerate():
        if thread.name == "copy to disk":
            thread.join(20)
    assert near[1].store.list() == [], "what came too late is not stored"
    assert _load(store).places.keys() == {"store"}


def test_a_failed_save_leaves_no_copies(near, tmp_path, monkeypatch):
    durable, alarms = LocalStore(tmp_path / "durable"), []

    def refuse(key, parts, size):
        next(iter(parts))
        raise StorageError("no space is left on the device")

    monkeypatch.setattr(durable, "put_parts", refuse)
    store = Places(durable, near, near, alarms.append)
    with pytest.raises(StorageError, match="no space"):
        store.put_parts("steps/000000000001-000001-0001/rank-00000.bin", [b"ab", b"cd"], 4)
    for thread in threading.enumerate():
        if thread.name.startswith("copy to"):
            thread.join(5)
            assert not thread.is_alive()
    assert [place.store.list() for place in near] == [[], []] and alarms == []


def test_nearer_places_hold_the_two_newest(near, tmp_path):
    durable, alarms = LocalStore(tmp_path / "durable"), []
    store = Places(durable, near, near, alarms.append)
    _save(store, [10, 20, 30])
    _save(store, [25])  # a new attempt went back
    for place in near:
        assert [e.key[6:18].lstrip("0") for e in place.store.list()] == ["25", "30"], place.name
    assert [path.name[:19] for path in newest_first(tmp_path / "disk" / "steps")] == [
        "000000000025-000002",
        "000000000030-000001",
    ]
    assert len(list_committed(durable)) == 4 and alarms == []


def test_the_newest_of_ten_thousand_saves_of_an_attempt(tmp_path):
    names = [Committed(step, 1).folder(serial).removeprefix("steps/") for step, serial in ((7, 9999), (5, 10_000))]
    for name in [*names, "latest"]:
        (tmp_path / name).mkdir()
    assert [path.name for path in newest_first(tmp_path)] == names[::-1]


def test_a_copy_of_another_run_of_the_same_name_is_replaced(near, tmp_path):
    alarms = []
    _save(Places(LocalStore(tmp_path / "old"), near, near, alarms.append), [2])
    new = Places(LocalStore(tmp_path / "new"), near, near, alarms.append)
    checkpointer = one(new)
    state = full_state(1) | {"model.half": torch.zeros(11, 6).bfloat16()}
    assert checkpointer.save(2, state, {}, asynchronous=False).result().ok
    checkpointer.close()
    target = full_state(99)
    assert load_newest(new, target).places.keys() == {"memory"} and alarms == []
    assert_same(target, state)


def test_a_scrub_reads_the_durable_bytes(near, tmp_path):
    durable = LocalStore(tmp_path / "durable")
    store = Places(durable, near, near, lambda text: None)
    _save(store, [1])
    (key,) = [e.key for e in durable.list("steps") if e.key.endswith(".bin")]
    data = bytearray(durable.get(key))
    data[5] ^= 1
    durable.delete(key)
    durable.put(key, bytes(data))
    assert verify_and_mark(store, newest(store))


def _two_hosts(rank, world, path, addresses, phase):
    """A rank a host; each copies to its own keeper and to the next host's, and reads its own first."""
    keepers = [KeeperStore(address, "secret", "run/base") for address in addresses]
    own, other = Place("memory", keepers[rank]), Place(f"memory of {1 - rank}", keepers[1 - rank])
    alarms = []
    store = Places(LocalStore(path), [own, other], [own, other], alarms.append)
    kv = dist.distributed_c10d._get_default_store()
    part = {f"model.{rank}": torch.full((1000,), float(rank + 1)), "model.both": torch.arange(500)}
    if phase == "save":
        checkpointer = Checkpointer(
            store, attempt=1, rank=rank, world=world, kv=kv, block_bytes=1024, deadline_s=20.0, facts={}
        )
        assert checkpointer.save(1, part, {}, asynchronous=True).result().ok
        checkpointer.close()
        return alarms
    target = {name: torch.zeros_like(value) for name, value in part.items()}
    loaded = load_newest(store, target, group=Group.of(kv, rank, world, 20.0))
    assert_same(target, part)
    return loaded.places, alarms


def test_a_neighbours_copy_is_used_when_the_own_keeper_is_lost(tmp_path):
    begin_epoch(LocalStore(tmp_path))
    keepers = [Keeper("secret", limit_bytes=1 << 24) for _ in range(2)]
    try:
        addresses = [keeper.address for keeper in keepers]
        assert run_ranks(_two_hosts, 2, tmp_path, addresses, "save") == [[], []]
        total = 2 * 4000 + 500 * 8
        for places, alarms in run_ranks(_two_hosts, 2, tmp_path, addresses, "load"):
            assert places == {"memory": total + 500 * 8} and alarms == []
        keepers[0].close()
        with_loss = run_ranks(_two_hosts, 2, tmp_path, addresses, "load")
        assert all(places.keys() == {"memory", "memory of 1"} for places, _ in with_loss)
        assert "no checkpoint can be read from memory: " in with_loss[0][1][0]
    finally:
        for keeper in keepers:
            keeper.close()
