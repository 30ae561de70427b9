"""The local store: durable, create-only, and one sentence when the disk or the rights fail."""

import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.dist import run_ranks
from truestep.errors import StorageError
from truestep.storage.disk import Disk
from truestep.storage.interface import Entry, KeyExists, MissingKey
from truestep.storage.local import LocalStore
from truestep.storage.probe import require_safe


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_put_get_list(tmp_path):
    store = LocalStore(tmp_path / "deep" / "root")
    assert store.list("nothing") == []
    store.put("a/b", b"0123456789")
    assert store.put_parts("a/c", [b"01", memoryview(b"234")], 5) == 5
    assert store.get("a/c") == b"01234"
    assert store.get_range("a/b", 2, 5) == b"234"
    assert b"".join(store.stream("a/b")) == b"0123456789"
    assert store.list("a") == store.list() == [Entry("a/b", 10), Entry("a/c", 5)]
    store.delete("a/b")
    for attempt in (store.get, store.head, store.delete, lambda key: list(store.stream(key))):
        with pytest.raises(MissingKey, match="there is no such file"):
            attempt("a/b")
    with pytest.raises(StorageError, match="ends at byte 5, but byte 9 is needed"):
        store.get_range("a/c", 0, 9)
    with pytest.raises(StorageError, match="is not a key"):
        store.put("../escape", b"")


@pytest.mark.parametrize("way", ["put", "create"])
def test_taken_name_is_left_as_it_is(tmp_path, way):
    store = LocalStore(tmp_path)
    store.create("k", b"first")
    with pytest.raises(KeyExists, match="never replaced"):
        getattr(store, way)("k", b"second")
    assert store.get("k") == b"first" and _files(tmp_path) == ["k"]


def _race(rank, world, path):
    dist.barrier()
    won = True
    try:
        LocalStore(path).create("commits/1", str(rank).encode())
    except KeyExists:
        won = False
    dist.barrier()  # nobody leaves while another still connects
    return won


def test_only_one_creator_wins(tmp_path):
    assert sum(run_ranks(_race, 4, tmp_path)) == 1
    assert _files(tmp_path) == ["commits/1"]


def test_a_store_on_disk_is_safe(tmp_path):
    store = LocalStore(tmp_path)
    assert require_safe(store).checksum_refused is None
    assert _files(tmp_path) == ["probe/1.json"]


def _mount(folder: Path, *arguments: str) -> bool:
    folder.mkdir()
    command = ["mount", *arguments, str(folder)]
    return os.getuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, or where mounting is not permitted, a limit on the size of a file."""
    folder = tmp_path / "small"
    if _mount(folder, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        yield folder
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk(small_disk):
    store = LocalStore(small_disk)
    store.put("small", b"fits")
    with pytest.raises(StorageError, match=r"big: cannot write it: (no space is left|the file would exceed)") as caught:
        store.put("data/big", bytes(2 << 20))
    assert "\n" not in str(caught.value)
    assert _files(small_disk) == ["small"]


def test_read_only_disk(tmp_path):
    folder = tmp_path / "read-only"
    if not _mount(folder, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        pytest.skip("mounting is not permitted here; test_no_folder_possible covers the rest")
    try:
        with pytest.raises(StorageError, match="the file system is read-only; mount it writable"):
            LocalStore(folder).put("a/b", b"x")
        assert _files(folder) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_no_folder_possible(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="a part of the path is a file, not a folder"):
        LocalStore(tmp_path / "file").put("a/b", b"x")
    assert _files(tmp_path) == ["file"]


class Written(Disk):
    """Notes the calls that change something."""

    def __init__(self):
        self.calls = []

    def sync(self, handle):
        self.calls.append("sync")
        super().sync(handle)

    def link(self, old, new):
        self.calls.append("link")
        super().link(old, new)

    def unlink(self, path):
        self.calls.append("unlink")
        super().unlink(path)

    def make_folder(self, path):
        self.calls.append(f"make {path.name}")
        super().make_folder(path)

    def sync_folder(self, path):
        self.calls.append(f"sync {path.name}")
        super().sync_folder(path)


def test_bytes_are_durable_before_the_name_and_the_name_before_the_answer(tmp_path):
    """The order of the calls that guard against a power cut; what it is good for: checkpoint/test_fire_disk.py."""
    disk = Written()
    store = LocalStore(tmp_path / "new", disk=disk)
    store.event = lambda name: disk.calls.append(name.split(": ")[1])
    store.put("a/b", b"bytes")
    at = tmp_path.name
    assert disk.calls[disk.calls.index("make new") :] == [
        *("make new", f"sync {at}", "make a", "sync new"),
        *("opened", "part 1", "written", "sync", "synced", "link", "linked", "unlink", "sync a", "folder synced"),
    ]
    disk.calls.clear()
    LocalStore(tmp_path / "new", disk=disk).put("a/c", b"bytes")  # whoever made the folders may not have synced them
    assert f"sync {at}" in disk.calls and "sync new" in disk.calls
    assert not [call for call in disk.calls if call.startswith("make")]


def test_few_calls_for_many_small_parts(tmp_path):
    """And big ones are not copied."""
    sizes = []

    class Counting(Disk):
        def write(self, handle, data):
            sizes.append(len(data))
            return super().write(handle, data[: (1 << 20) - 3])

    parts = [b"x" * 1000] * 2000 + [bytes(3 << 20)] + [b"y"]
    store = LocalStore(tmp_path, disk=Counting())
    assert store.put_parts("a", parts, 0) == 2_000_000 + (3 << 20) + 1
    assert store.get("a") == b"".join(parts) and len(sizes) == 7
