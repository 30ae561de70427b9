"""The keeper: a store in another process's memory that outlives its clients, asks for a token, and stays bounded."""

import io
import os
import signal
import socket
import threading
import time
from multiprocessing import get_context

import pytest

from truestep.elastic.keeper import Keeper, KeeperServer
from truestep.errors import StorageError
from truestep.storage.interface import KeyExists, MissingKey
from truestep.storage.keeper import KeeperStore, receive, send


@pytest.fixture
def server():
    with KeeperServer("127.0.0.1", "secret", 1 << 20) as made:
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def store(server):
    return KeeperStore(server.address, "secret", "run/base")


def test_what_a_store_does(store):
    data = bytes(range(256)) * 40
    assert store.put_parts("steps/1/a.bin", [data[:100], memoryview(data)[100:]], len(data)) == len(data)
    assert store.get("steps/1/a.bin") == data and b"".join(store.stream("steps/1/a.bin")) == data
    assert store.get_range("steps/1/a.bin", 5, 9) == data[5:9]
    out = bytearray(3)
    store.read_into("steps/1/a.bin", 1, memoryview(out))
    assert bytes(out) == data[1:4]
    assert [(e.key, e.size) for e in store.list("steps")] == [("steps/1/a.bin", len(data))]
    assert store.head("steps/1/a.bin").size == len(data) and store.list("other") == []
    assert KeeperStore(store.address, "secret", "run/other").list() == []
    with pytest.raises(KeyExists):
        store.create("steps/1/a.bin", b"other")
    with pytest.raises(StorageError, match=r"ends before byte 10241"):
        store.get_range("steps/1/a.bin", 5, len(data) + 1)
    store.delete("steps/1/a.bin")
    for doing in (store.get, store.head, store.delete):
        with pytest.raises(MissingKey):
            doing("steps/1/a.bin")


def test_only_with_the_token(server):
    with pytest.raises(StorageError, match="does not know this token"):
        KeeperStore(server.address, "wrong", "run/base").list()


def test_a_client_that_goes_on_without_the_token_is_not_served(server, store):
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as client:
        source, sink = client.makefile("rb"), client.makefile("wb", buffering=0)
        receive(source)
        send(sink, {"proof": "wrong"})
        assert receive(source) == {"ok": False}
        with pytest.raises((EOFError, ConnectionError)):  # which of them, depends on who is quicker
            send(sink, {"op": "put", "key": "run/base/steps/1/a", "size": 1})
            sink.write(b"x")
            receive(source)
    assert store.list() == []


def test_noise_on_the_port_is_no_trouble(server, store):
    host, port = server.address.split(":")
    for noise in (b"GET / HTTP/1.0\r\n\r\n", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]"):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(noise)
    store.put("steps/1/a", b"1")
    assert store.get("steps/1/a") == b"1"
    with pytest.raises(ValueError, match="a header that is a list"):
        receive(io.BytesIO(b"\x00\x00\x00\x02[]"))


def test_the_two_newest_folders_stay(server, store):
    for step in (1, 2, 3):
        for name in ("a", "b"):
            store.put(f"steps/{step}/{name}", bytes(100))
    assert [entry.key for entry in store.list()] == ["steps/2/a", "steps/2/b", "steps/3/a", "steps/3/b"]
    assert server.memory.used_bytes == 400
    with pytest.raises(StorageError, match="newer checkpoints took its place"):
        store.put("steps/1/late", b"x")
    assert len(store.list()) == 4


def test_never_more_than_the_limit(server, store):
    store.put("steps/1/a", bytes(700 << 10))
    store.put("steps/2/a", bytes(600 << 10))
    assert [entry.key for entry in store.list()] == ["steps/2/a"]
    with pytest.raises(StorageError, match="do not fit"):
        store.put("steps/2/b", bytes(600 << 10))
    assert store.get("steps/2/a") == bytes(600 << 10) and server.memory.used_bytes == 600 << 10


def test_an_object_is_there_whole_or_not_at_all(server, store):
    def broken():
        yield b"x" * 100
        raise RuntimeError("the writer died")

    with pytest.raises(RuntimeError):
        store.put_parts("steps/1/a", broken(), 200)
    with pytest.raises(StorageError, match="100 bytes came, but 200 were announced"):
        store.put_parts("steps/1/a", [b"x" * 100], 200)
    with pytest.raises(MissingKey):
        store.head("steps/1/a")
    deadline = time.monotonic() + 10
    while server.memory.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.memory.used_bytes == 0
    store.put("steps/1/a", b"whole")
    assert store.get("steps/1/a") == b"whole"


def test_no_keeper_is_said_in_a_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = KeeperStore(f"127.0.0.1:{taken.getsockname()[1]}", "secret", "run/base")
    with pytest.raises(StorageError, match="the keeper does not answer"):
        gone.list()


def _write_and_hang(address, ready):
    KeeperStore(address, "secret", "run/base").put("steps/1/a", b"kept")
    store = KeeperStore(address, "secret", "run/base")

    def endless():
        yield b"half"
        ready.set()
        time.sleep(60)

    store.put_parts("steps/1/b", endless(), 8)


def test_a_keeper_outlives_killed_workers_and_ends_with_its_starter():
    keeper = Keeper("secret", limit_bytes=1 << 20)
    context = get_context("fork")
    ready = context.Event()
    worker = context.Process(target=_write_and_hang, args=(keeper.address, ready))
    worker.start()
    assert ready.wait(20) and worker.pid
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    store = KeeperStore(keeper.address, "secret", "run/base")
    assert [entry.key for entry in store.list()] == ["steps/1/a"] and store.get("steps/1/a") == b"kept"
    keeper.close()
    assert keeper.process.returncode == 0
