"""The cache of remote files: fetched once, verified on every use, safe for several processes."""

import functools
import http.server
import json
import subprocess
import sys
import threading
import uuid

import pytest

from truestep.errors import StorageError
from truestep.storage.cache import expand, fetch
from truestep.storage.objects import ObjectStore


@pytest.fixture
def remote(seaweed):
    store = ObjectStore(f"{seaweed.url}/{uuid.uuid4().hex}", seaweed.options)
    for name in ("a/1.txt", "a/2.txt", "b/3.txt", "a/4.md"):
        store.put(name, name.encode())
    return store


def test_local_paths_pass_through(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert expand(f"{tmp_path}/*.txt") == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    assert expand("anything/at/all") == ["anything/at/all"]
    assert fetch(f"file://{tmp_path}/a.txt", None, tmp_path / "cache") == tmp_path / "a.txt"
    assert not (tmp_path / "cache").exists()
    with pytest.raises(StorageError, match=r"\*.json: no file matches"):
        expand(f"{tmp_path}/*.json")


@pytest.mark.s3
def test_globs_in_a_bucket(remote, seaweed):
    assert expand(f"{remote.url}/a/*.txt", seaweed.options) == [f"{remote.url}/a/1.txt", f"{remote.url}/a/2.txt"]
    assert len(expand(f"{remote.url}/*.txt", seaweed.options)) == 3


@pytest.mark.s3
def test_fetched_once_and_again_when_either_side_changed(remote, seaweed, tmp_path):
    url = f"{remote.url}/a/1.txt"
    path = fetch(url, seaweed.options, tmp_path)
    assert path.name == "1.txt" and path.read_bytes() == b"a/1.txt"
    first = path.stat().st_ino
    assert fetch(url, seaweed.options, tmp_path).stat().st_ino == first, "not fetched again"

    path.write_bytes(b"a/9.txt")  # damage of the same size
    assert fetch(url, seaweed.options, tmp_path).read_bytes() == b"a/1.txt"
    remote.put("a/1.txt", b"newer!!")
    assert fetch(url, seaweed.options, tmp_path).read_bytes() == b"newer!!"
    assert not [file for file in tmp_path.rglob(".tmp-*")]


@pytest.mark.s3
def test_missing_remote_file_leaves_nothing(remote, seaweed, tmp_path):
    with pytest.raises(StorageError, match="no such object"):
        fetch(f"{remote.url}/a/none.txt", seaweed.options, tmp_path)
    assert list(tmp_path.iterdir()) == []


FETCH = """
import json, sys
from truestep.storage.cache import fetch
url, options, folder = json.loads(sys.argv[1])
sys.stdout.buffer.write(fetch(url, options, folder).read_bytes())
"""


@pytest.mark.s3
def test_several_processes_at_once(remote, seaweed, tmp_path):
    """New interpreters, since the client's threads do not survive a fork."""
    content = bytes(range(256)) * 1000
    remote.put("x.bin", content)
    argument = json.dumps([f"{remote.url}/x.bin", seaweed.options, str(tmp_path)])
    command = [sys.executable, "-c", FETCH, argument]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=60)[0] for process in running] == [content] * 3
    (folder,) = tmp_path.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == ["x.bin", "x.bin.json", "x.bin.lock"]


def test_a_file_over_http(tmp_path):
    """Any web server will do: the cache needs no more than HEAD and GET."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.txt").write_bytes(b"over http")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.txt"
        assert fetch(url, {"allow_http": "true"}, tmp_path / "cache").read_bytes() == b"over http"
        with pytest.raises(StorageError, match="there is no such object"):
            fetch(url.replace("a.txt", "b.txt"), {"allow_http": "true"}, tmp_path / "cache")
        server.shutdown()
