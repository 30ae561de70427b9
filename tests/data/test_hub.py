"""Datasets and tokenizers of a hub, served by a fake one on loopback through HF_ENDPOINT."""

import gzip
import io
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.fake_hub import FakeHub, FakeRepo, commit_id
from truestep.data.build import build
from truestep.data.sample import make_tokenizer
from truestep.data.sources.registry import open_source, read
from truestep.data.tokenizer import bytes_tokenizer
from truestep.errors import DataError
from truestep.recipe.data import DataSection, TokenizerSection

OLD, NEW = commit_id(1), commit_id(2)


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parquet(*texts: str) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), out)
    return out.getvalue()


@pytest.fixture
def hub(monkeypatch):
    files = {
        "README.md": b"a card",
        "load.py": b"open('MARKER', 'w')",
        "data/train-0.parquet": parquet("one", "two"),
        "data/train-1.jsonl.gz": gzip.compress(jsonl("three")),
        "data/test-0.parquet": parquet("never train on this"),
    }
    repos = {
        "datasets/o/d": FakeRepo({OLD: files, NEW: files | {"data/train-2.jsonl": jsonl("four")}}, {"main": OLD}),
        "datasets/o/plain": FakeRepo({OLD: {"a.jsonl": jsonl("x"), "b/c.jsonl": jsonl("y")}}, {"main": OLD}),
        "datasets/o/gated": FakeRepo({OLD: {}}, {"main": OLD}, gated=True),
    }
    repos["datasets/o/d"].large |= {"data/train-0.parquet", "data/test-0.parquet"}
    with FakeHub(repos) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def section(repo="o/d", **options) -> DataSection:
    return DataSection(source="hf-hub", options={"repo": repo} | options)


def texts(section: DataSection, cache) -> list[str | None]:
    return [d.text for d in read(open_source(section, cache))]


def test_a_branch_is_resolved_to_a_commit_and_recorded(hub, tmp_path):
    store = build(section(revision="main"), bytes_tokenizer(), tmp_path / "s")
    source = store.header["report"]["source"]
    assert source["commit"] == OLD and source["asked_for"] == "main"
    assert [bytes(store.document(i)[:-1].astype("u1")) for i in range(3)] == [b"one", b"two", b"three"]
    hub.repos["datasets/o/d"].branches["main"] = NEW
    assert texts(section(revision=OLD), tmp_path) == ["one", "two", "three"]
    assert texts(section(revision="main"), tmp_path) == ["one", "two", "three", "four"]


def test_files_are_fetched_by_commit_and_only_the_split_asked_for(hub, tmp_path):
    texts(section(revision="main"), tmp_path)
    fetched = [r for r in hub.requests if "/resolve/" in r]
    assert fetched and all(f"/resolve/{OLD}/data/train" in r for r in fetched)
    assert texts(section(revision="main", split="test"), tmp_path) == ["never train on this"]
    assert len(texts(section(revision="main", split="all"), tmp_path)) == 4


def test_streaming_keeps_no_file_and_downloading_does(hub, tmp_path):
    stream = section(revision="main", stream=True)
    assert texts(stream, tmp_path / "a") == texts(section(revision="main"), tmp_path / "b") == ["one", "two", "three"]
    assert not [name for _, _, names in os.walk(tmp_path / "a") for name in names]
    before = len([r for r in hub.requests if r.startswith("GET") and "/resolve/" in r])
    texts(section(revision="main"), tmp_path / "b")
    assert len([r for r in hub.requests if r.startswith("GET") and "/resolve/" in r]) == before


def test_c89_code_in_a_dataset_repository_is_never_run(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts(section(revision="main"), tmp_path)
    assert not (tmp_path / "MARKER").exists() and not any("load.py" in r for r in hub.requests)


def test_card_configs_and_folders_choose_files(hub, tmp_path):
    repo = hub.repos["datasets/o/plain"]
    assert texts(section("o/plain", revision="main"), tmp_path) == ["x", "y"]
    assert texts(section("o/plain", revision="main", config="b"), tmp_path) == ["y"]
    assert texts(section("o/plain", revision="main", files=["a.*"]), tmp_path) == ["x"]
    repo.card["configs"] = [
        {"config_name": "one", "data_files": "a.jsonl"},
        {"config_name": "two", "data_files": [{"split": "train", "path": "b/*"}, {"split": "test", "path": "a*"}]},
    ]
    assert texts(section("o/plain", revision="main", config="one"), tmp_path) == ["x"]
    assert texts(section("o/plain", revision="main", config="two"), tmp_path) == ["y"]
    with pytest.raises(DataError, match=r"has the configs one, two; set options\.config"):
        texts(section("o/plain", revision="main"), tmp_path)


def test_a_file_that_does_not_match_the_hubs_hash_is_refused(hub, tmp_path):
    for name in ("data/train-0.parquet", "data/train-1.jsonl.gz"):
        hub.corrupt = {name}
        with pytest.raises(DataError, match=f"{name}.*does not match the hub's hash"):
            texts(section(revision="main", stream=True), tmp_path / name)


@pytest.mark.parametrize(
    "repo, options, says",
    [
        ("o/d", {}, "hub repository o/d has no revision; set options.revision"),
        ("o/none", {"revision": "main"}, "hub repository o/none does not exist or is private"),
        ("o/d", {"revision": "v9"}, "hub repository o/d has no revision 'v9'"),
        ("o/gated", {"revision": "main"}, "hub repository o/gated is gated"),
        ("a/b/c", {"revision": "main"}, "'a/b/c' is not the name of a hub repository"),
        ("o/d", {"revision": "main", "split": "validation"}, "has no Parquet or JSON Lines"),
        ("o/d", {"revision": "main", "spilt": "test"}, "does not use 'spilt'"),
    ],
)
def test_bad_hub_sources_are_one_sentence_and_leave_nothing(hub, tmp_path, repo, options, says):
    with pytest.raises(DataError) as error:
        build(section(repo, **options), bytes_tokenizer(), tmp_path / "store")
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_an_unreachable_hub_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"hub repository o/d@main cannot be read"):
        texts(section(revision="main"), tmp_path)


def test_a_tokenizer_by_hub_id_is_pinned_to_a_commit(hub, tmp_path):
    bytes_tokenizer().save(tmp_path / "t")
    files = {p.name: p.read_bytes() for p in (tmp_path / "t").iterdir()}
    hub.repos["models/o/m"] = FakeRepo({NEW: files | {"tokenizer.py": b"raise SystemExit"}}, {"main": NEW})
    section = TokenizerSection(kind="file", path="o/m@main")
    tokenizer = make_tokenizer(section, [], tmp_path / "cache")
    assert tokenizer.origin == f"o/m@{NEW}" and tokenizer.fingerprint == bytes_tokenizer().fingerprint
    del hub.repos["models/o/m"].commits[NEW]["tokenizer.json"]
    with pytest.raises(DataError, match=r"o/m@.* has no tokenizer\.json"):
        make_tokenizer(section, [], tmp_path / "other")
