"""Stores against real S3 servers: what the probe finds, what is refused, and the sentences for what goes wrong."""

import uuid

import pytest

from tests.servers import S3Server, _free_ports
from truestep.errors import StorageError
from truestep.storage.interface import KeyExists, MissingKey
from truestep.storage.objects import RETRIES, ObjectStore
from truestep.storage.probe import RECORD, capabilities, require_safe
from truestep.storage.store import open_store

pytestmark = pytest.mark.s3


@pytest.fixture
def store(seaweed: S3Server) -> ObjectStore:
    return ObjectStore(f"{seaweed.url}/{uuid.uuid4().hex}", seaweed.options)


def test_put_get_range_list_delete(store):
    store.put("a/one", b"0123456789")
    assert store.put_parts("a/big", iter([memoryview(b"x" * (9 << 20))] * 3), 27 << 20) == 27 << 20
    assert store.head("a/big").size == 27 << 20
    assert store.get("a/one") == b"0123456789"
    assert store.get_range("a/one", 3, 6) == b"345"
    assert sum(len(piece) for piece in store.stream("a/big")) == 27 << 20
    assert [entry.key for entry in store.list("a")] == ["a/big", "a/one"]
    store.delete("a/one")
    with pytest.raises(MissingKey, match="no such object"):
        store.get("a/one")


def test_short_object_is_an_error(store):
    store.put("short", b"0123456789")
    with pytest.raises(StorageError, match="ends at byte 10, but byte 20 is needed"):
        store.get_range("short", 5, 20)


def test_create_only(store):
    store.create("commit", b"first")
    with pytest.raises(KeyExists, match="was left as it is"):
        store.create("commit", b"second")
    assert store.get("commit") == b"first"


def test_strict_server_is_accepted_and_recorded(store):
    found = require_safe(store)
    assert (found.create_only, found.range_read, found.list_after_put, found.checksum_refused) == (True,) * 4
    assert [entry.key for entry in store.list()] == [RECORD]
    assert capabilities(store) == found


def test_lax_server_is_refused(rclone):
    store = ObjectStore(f"{rclone.url}/{uuid.uuid4().hex}", rclone.options)
    with pytest.raises(StorageError, match="cannot commit a checkpoint safely, because it overwrites") as caught:
        require_safe(store)
    assert "\n" not in str(caught.value)
    assert store.list() == []


@pytest.mark.parametrize("wrong", [{"secret_access_key": "wrong"}, {"access_key_id": "nobody"}])
def test_wrong_credentials(seaweed, wrong):
    store = ObjectStore(f"{seaweed.url}/x", {**seaweed.options, **wrong})
    for attempt in (lambda: store.put("k", b"1"), lambda: store.create("k", b"1"), store.list, lambda: store.get("k")):
        with pytest.raises(StorageError, match="wrong credentials") as caught:
            attempt()
        assert "\n" not in str(caught.value) and seaweed.url in str(caught.value)


def test_secrets_come_from_the_environment(seaweed, monkeypatch):
    """So that no recipe and no log holds them."""
    options = dict(seaweed.options)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.pop("access_key_id"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options.pop("secret_access_key"))
    store = ObjectStore(f"{seaweed.url}/{uuid.uuid4().hex}", options)
    store.create("k", b"1")
    assert store.get("k") == b"1"


def test_no_such_bucket(seaweed):
    with pytest.raises(StorageError, match="there is no such bucket"):
        ObjectStore("s3://nowhere/x", seaweed.options).get("k")  # this server makes buckets on a put


def test_unreachable_server(seaweed, monkeypatch):
    monkeypatch.setitem(RETRIES, "max_retries", 1)
    (port,) = _free_ports(1)
    store = ObjectStore(seaweed.url, {**seaweed.options, "endpoint": f"http://127.0.0.1:{port}"})
    with pytest.raises(StorageError, match="cannot be reached"):
        store.create("k", b"1")


def test_options_nobody_would_use():
    with pytest.raises(StorageError, match="takes no storage options, but region is set"):
        open_store("/tmp/x", {"region": "us-east-1"})
    with pytest.raises(StorageError, match="'ftp' is not a known kind of store"):
        open_store("ftp://x/y")
    with pytest.raises(StorageError, match="colour"):
        open_store("s3://bucket/x", {"colour": "blue"})
