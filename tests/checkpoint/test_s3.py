"""Checkpoints in a real S3 server; a lax one is refused before anything is written."""

import uuid

import pytest
import torch

from tests.checkpoint.common import assert_same, full_state, one, save_one
from truestep.checkpoint.catalogue import Committed, begin_epoch, list_committed, newest
from truestep.checkpoint.load import load_newest
from truestep.checkpoint.verify import verify
from truestep.errors import StorageError
from truestep.storage.objects import ObjectStore

pytestmark = pytest.mark.s3


@pytest.fixture
def store(seaweed):
    return ObjectStore(f"{seaweed.url}/{uuid.uuid4().hex}", seaweed.options)


def test_save_load_verify(store):
    for step in (1, 2):
        assert save_one(store, step, full_state(step)).ok
    assert [verify(store, committed) for committed in list_committed(store)] == [[], []]
    target = full_state(9)
    assert load_newest(store, target).step == 2
    assert_same(target, full_state(2))


def test_big_objects_in_parts(store):
    state = {"model.big": torch.arange(9 << 20, dtype=torch.float32)}
    checkpointer = one(store, block_bytes=8 << 20, deadline_s=60.0)
    result = checkpointer.save(1, state, {}, asynchronous=True).result()
    checkpointer.close()
    assert result.ok, result.error
    target = {"model.big": torch.zeros(9 << 20)}
    assert load_newest(store, target).bytes_read == 36 << 20
    assert_same(target, state)


def test_damage_in_the_bucket(store):
    for step in (1, 2):
        assert save_one(store, step, full_state(step)).ok
    key = next(entry.key for entry in store.list("steps") if entry.key.endswith(".bin") and "2-000002" in entry.key)
    data = bytearray(store.get(key))
    data[77] ^= 1
    store.put(key, bytes(data))
    target = full_state(9)
    loaded = load_newest(store, target)
    assert loaded.step == 1 and key in loaded.fell_back[0]
    assert_same(target, full_state(1))
    assert len(verify(store, newest(store))) == 1


def test_commit_is_create_only(store):
    checkpointer = one(store)
    assert checkpointer.save(1, full_state(1), {}, asynchronous=False).result().ok
    assert "exists already" in checkpointer.save(1, full_state(2), {}, asynchronous=False).result().error
    checkpointer.close()
    assert list_committed(store) == [Committed(1, 1)]


def test_wrong_credentials(seaweed, store):
    wrong = ObjectStore(store.url, {**seaweed.options, "secret_access_key": "wrong"})
    with pytest.raises(StorageError, match="wrong credentials") as caught:
        begin_epoch(wrong)
    assert "\n" not in str(caught.value)
    checkpointer = one(store)
    checkpointer.store = wrong
    result = checkpointer.save(1, full_state(1), {}, asynchronous=True).result()
    checkpointer.close()
    assert not result.ok and "wrong credentials" in result.error and list_committed(store) == []


def test_lax_server_is_refused(rclone):
    store = ObjectStore(f"{rclone.url}/{uuid.uuid4().hex}", rclone.options)
    with pytest.raises(StorageError, match="cannot commit a checkpoint safely"):
        begin_epoch(store)
    assert store.list() == []
