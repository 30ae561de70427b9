"""Hub models by commit, from a hub on loopback."""

from pathlib import Path

import pytest
import torch

from tests.data.fake_hub import FakeHub, FakeRepo, commit_id
from tests.models.sections import VOCAB, small
from truestep.errors import ModelError
from truestep.models.build import build_model, init_weights
from truestep.models.hf_save import save_hf
from truestep.models.hub import fetch, is_hub_id
from truestep.models.load import load_model, tensors_of

OLD, NEW, PICKLED = (commit_id(i) for i in range(3))


def files(folder: Path, seed: int) -> dict[str, bytes]:
    model = build_model(small(), VOCAB).to_empty(device="cpu")
    init_weights(model, seed)
    save_hf(folder, tensors_of(model), small())
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commits = {OLD: files(tmp_path / "old", 0), NEW: files(tmp_path / "new", 1)}
    commits[PICKLED] = {"config.json": b"{}", "pytorch_model.bin": b"\x80"}
    branches = {"main": NEW, "pickled": PICKLED}
    with FakeHub({"models/org/tiny": FakeRepo(commits, branches, large={"model.safetensors"})}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_branch_becomes_a_commit(hub: FakeHub, tmp_path: Path):
    newest = fetch("org/tiny", tmp_path / "cache")
    assert newest.pinned == f"org/tiny@{NEW}" and fetch("org/tiny@main", tmp_path / "cache") == newest
    older = fetch(f"org/tiny@{OLD}", tmp_path / "cache")
    assert older.pinned == f"org/tiny@{OLD}"
    for found, folder in ((newest, "new"), (older, "old")):
        ours, theirs = load_model(found.directory), load_model(tmp_path / folder)
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))


def test_a_pinned_model_needs_no_network_twice(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = fetch(f"org/tiny@{OLD}", tmp_path / "cache")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert fetch(first.pinned, tmp_path / "cache") == first
    for hub_id in ("org/tiny@main", f"org/tiny@{NEW}"):
        with pytest.raises(ModelError, match="cannot be fetched"):
            fetch(hub_id, tmp_path / "cache")


def test_c89_pickled_weights_are_not_even_fetched(hub: FakeHub, tmp_path: Path):
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, a pickle"):
        fetch("org/tiny@pickled", tmp_path / "cache")
    assert not any("resolve" in request for request in hub.requests)


def test_a_flipped_byte_is_found(hub: FakeHub, tmp_path: Path):
    hub.corrupt.add("model.safetensors")
    with pytest.raises(ModelError, match=r"is not the file model\.safetensors"):
        fetch("org/tiny", tmp_path / "cache")


@pytest.mark.parametrize("hub_id", ["org/none", "org/tiny@nobranch"])
def test_what_the_hub_does_not_have(hub: FakeHub, tmp_path: Path, hub_id: str):
    with pytest.raises(ModelError, match=f"{hub_id} cannot be fetched"):
        fetch(hub_id, tmp_path / "cache")


def test_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/name") and is_hub_id(f"org/name@{OLD}") and is_hub_id("org/na.me-1@refs/pr/3")
    assert not any(is_hub_id(text) for text in ("init", "/abs/path", "./org/name", "stage:base", "a/b/c"))
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_id("org/name")
