"""Every source gives the same documents as were put in, in a fixed order, and names file and row of bad input."""

import gzip
import json
import os
import pickle
import sys
import tempfile
import uuid
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.data.users import unprivileged
from truestep.data.build import build
from truestep.data.sources import jsonl as jsonl_source
from truestep.data.sources import parquet as parquet_source
from truestep.data.sources.inputs import InputFile
from truestep.data.sources.registry import SOURCES, open_source, read
from truestep.data.tokenizer import bytes_tokenizer
from truestep.errors import DataError, UserError
from truestep.recipe.data import DataSection
from truestep.storage.objects import ObjectStore

TEXTS = ["first\r\nline", "", "zweite Zeile ü", "🙂", " spaces \t kept ", "\ufeffmark and \u2028 separator"]


def section(source: str, path=None, **changes) -> DataSection:
    return DataSection(source=source, path=None if path is None else str(path), **changes)


def texts(one: DataSection, cache=Path("unused")) -> list[str | None]:
    return [d.text for d in read(open_source(one, cache))]


def lines(values=TEXTS, field="text") -> bytes:
    return "".join(json.dumps({field: v, "other": 1}) + "\n" for v in values).encode()


def refused(one: DataSection, out: Path) -> str:
    """The sentence that a build ends with; checks that nothing was left behind."""
    before = sorted(out.rglob("*")) if out.exists() else []
    with pytest.raises(UserError) as error:
        build(one, bytes_tokenizer(), out / "deep" / "store")
    assert "\n" not in str(error.value)
    assert (sorted(out.rglob("*")) if out.exists() else []) == before
    return str(error.value)


# text


def test_text_files_trees_and_globs(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.md", ".hidden", "sub/__pycache__/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(f"text of {name}\r\n".encode())
    everything = ["text of a.txt\r\n", "text of b.txt\r\n", "text of sub/c.txt\r\n", "text of sub/d.md\r\n"]
    assert texts(section("text", tmp_path)) == everything
    assert texts(section("text", tmp_path, options={"include": ["*.txt"], "exclude": ["sub/*"]})) == everything[:2]
    assert texts(section("text", f"{tmp_path}/*.txt")) == everything[:2]
    assert texts(section("text", f"{tmp_path}/**/*.md")) == everything[3:]
    assert texts(section("text", f"file://{tmp_path}/a.txt")) == everything[:1]
    both = DataSection(source="text", path=[str(tmp_path / "sub"), str(tmp_path / "sub" / "c.txt")])
    assert texts(both) == everything[2:]  # each file once


def test_bad_text_inputs(tmp_path):
    out = tmp_path / "out"
    assert refused(section("text", tmp_path / "no"), out).endswith(
        "/no does not exist; correct `path` of the data section."
    )
    assert "holds no input file" in refused(section("text", f"{tmp_path}/*.txt"), out)
    (tmp_path / "bad.txt").write_bytes(b"fine\nfine\nb\xff\n")
    said = refused(section("text", tmp_path / "bad.txt"), out)
    assert "bad.txt, line 3: byte 0xff at offset 11 is not UTF-8" in said
    (tmp_path / "empty.txt").write_bytes(b"")
    assert "the corpus is empty" in refused(section("text", tmp_path / "empty.txt"), out)
    assert "needs `path`" in refused(section("text"), out)
    assert "does not use 'includ'" in refused(section("text", tmp_path, options={"includ": "*"}), out)
    assert "data source 'txt' is unknown; use text, jsonl" in refused(section("txt", tmp_path), out)


def test_unreadable_files_and_folders():
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o777)
        (root / "a.txt").write_text("x")
        (root / "a.txt").chmod(0)
        (root / "closed").mkdir(mode=0)
        with unprivileged():
            assert "a.txt cannot be read: Permission denied" in refused(section("text", root / "a.txt"), root / "out")
            assert "closed cannot be read: Permission denied" in refused(section("text", root), root / "out")


def test_a_dangling_link_is_one_sentence(tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    (tmp_path / "x.jsonl" / "y.jsonl").symlink_to(tmp_path / "nowhere")
    assert "cannot be read: No such file" in refused(section("jsonl", tmp_path), tmp_path / "out")


# JSON Lines


def test_jsonl_plain_gzip_and_zstd(tmp_path):
    data = lines()
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data[:40]) + gzip.compress(data[40:]))
    frames = zstandard.ZstdCompressor()
    (tmp_path / "c.jsonl.zst").write_bytes(frames.compress(data[:55]) + frames.compress(data[55:]))
    (tmp_path / "ignored.csv").write_text("x")
    assert texts(section("jsonl", tmp_path)) == TEXTS * 3
    (tmp_path / "rows.json").write_bytes(data)  # a name that folders would skip is taken when it is asked for
    assert (
        texts(section("jsonl", f"file://{tmp_path}/rows.json"))
        == texts(section("jsonl", tmp_path / "rows.json"))
        == TEXTS
    )
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        assert texts(section("jsonl", tmp_path / name)) == TEXTS


@pytest.mark.parametrize("shard_bytes", [1, 7, 50, 10_000])
def test_jsonl_shards_hold_every_line_once(tmp_path, shard_bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([f"document {i} " + "x" * (i % 40) for i in range(50)]) + b"\n\n")
    shards = jsonl_source.file_shards(InputFile(str(path), "a.jsonl"), "text", shard_bytes)
    got = [d.text for shard in pickle.loads(pickle.dumps(shards)) for d in shard.documents()]
    assert got == texts(section("jsonl", path)) and len(got) == 50
    assert len({shard.name for shard in shards}) == len(shards)


@pytest.mark.parametrize(
    "line, says",
    [
        (b"{bad", "a.jsonl, line 3: not JSON"),
        (b"[1]", "line 3: a list, not an object with a field 'text'"),
        (b'{"txt": "x"}', "line 3: no field 'text' (fields: 'txt'); set `text_field`"),
        (b'{"text": null}', "line 3: field 'text' holds null, not text"),
        (b'{"text": NaN}', "line 3: field 'text' holds NaN, not text"),
        (b'{"text": 5}', "line 3: field 'text' holds 5, not text"),
        (b'{"text": "\xff"}', "line 3: the line is not UTF-8"),
        (b'{"text": "a\\ud800"}', "line 3: character 1 is U+D800, half of a pair"),
    ],
)
@pytest.mark.parametrize("shard_bytes", [10, 10_000])
def test_bad_json_lines_are_named(tmp_path, monkeypatch, line, says, shard_bytes):
    (tmp_path / "a.jsonl").write_bytes(lines(["x"]) + b"\n" + line + b"\n" + lines(["y"]))
    monkeypatch.setattr(jsonl_source.file_shards, "__defaults__", (shard_bytes,))
    said = refused(section("jsonl", tmp_path / "a.jsonl"), tmp_path / "out")
    if b"ud800" in line and shard_bytes == 10:
        says = "half of a pair"
    assert says in said


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_truncated_and_damaged_compression(tmp_path, name):
    data = lines([os.urandom(20).hex() for _ in range(200)])
    packed = gzip.compress(data) if name.endswith("gz") else zstandard.ZstdCompressor().compress(data)
    for cut in (len(packed) // 2, len(packed) - 1, 3):
        (tmp_path / name).write_bytes(packed[:cut])
        assert f"{name} is truncated" in refused(section("jsonl", tmp_path / name), tmp_path / "out")
    (tmp_path / name).write_bytes(b"not compressed at all")
    assert f"{name} is damaged" in refused(section("jsonl", tmp_path / name), tmp_path / "out")


# Parquet


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]
)
def test_parquet_columns_of_text(tmp_path, kind):
    table = pa.table({"text": pa.array(TEXTS).cast(kind), "n": range(len(TEXTS))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert texts(section("parquet", tmp_path)) == TEXTS
    file = InputFile(str(tmp_path / "a.parquet"), "a.parquet")
    shards = parquet_source.file_shards(file, "text", 1)
    assert len(shards) == 3 and [d.text for s in shards for d in s.documents()] == TEXTS
    assert [d.origin.rpartition("row ")[2] for s in shards for d in s.documents()] == [str(i) for i in range(6)]


@pytest.mark.parametrize(
    "column, says",
    [
        (pa.array(["a", "b", None, "c"]), "row 2: column 'text' (type string) holds null, not text"),
        (pa.array([1.0, float("nan"), 2.0]), "row 1: column 'text' (type double) holds NaN, not text"),
        (pa.array([None, float("nan")], pa.float64()), "row 0: column 'text' (type double) holds null"),
        (pa.array([7, 8]), "row 0: column 'text' (type int64) holds 7, not text"),
    ],
)
def test_nan_and_null_in_a_parquet_column_name_the_row(tmp_path, column, says):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=1)
    said = refused(section("parquet", tmp_path / "a.parquet"), tmp_path / "out")
    assert "a.parquet, " in said and says in said


def test_bad_parquet_files(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x" * 1000]}), path)
    assert "has no column 'text' (columns: body)" in refused(section("parquet", path), tmp_path / "out")
    path.write_bytes(path.read_bytes()[:-6])
    assert "a.parquet is not a Parquet file" in refused(section("parquet", path), tmp_path / "out")


# Saved Hugging Face datasets


def test_hf_saved_is_what_datasets_wrote(tmp_path):
    whole = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(6))})
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    assert texts(section("hf-saved", tmp_path / "one")) == TEXTS
    whole.filter(lambda row: row["n"] % 2 == 0).save_to_disk(tmp_path / "half")
    assert texts(section("hf-saved", tmp_path / "half")) == TEXTS[::2]
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "dict")
    assert texts(section("hf-saved", tmp_path / "dict", options={"split": "train"})) == TEXTS
    assert "holds the splits train, test; set options.split" in refused(
        section("hf-saved", tmp_path / "dict"), tmp_path
    )


def test_bad_saved_datasets(tmp_path):
    folder = tmp_path / "d"
    datasets.Dataset.from_dict({"text": ["x" * 500] * 10, "none": [None] * 10}).save_to_disk(folder)
    said = refused(section("hf-saved", folder, text_field="none"), tmp_path / "out")
    assert "row 0: column 'none' (type null) holds null" in said
    assert "has no column 'body'" in refused(section("hf-saved", folder, text_field="body"), tmp_path / "out")
    (arrow,) = folder.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:-8])
    assert "is truncated: its Arrow end mark is missing" in refused(section("hf-saved", folder), tmp_path / "out")
    arrow.unlink()
    assert "is missing, though state.json names it" in refused(section("hf-saved", folder), tmp_path / "out")
    (folder / "state.json").unlink()
    assert "is not a folder written by save_to_disk" in refused(section("hf-saved", folder), tmp_path / "out")


def test_c89_code_and_pickles_in_a_dataset_folder_are_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "d")
    (tmp_path / "d" / "d.py").write_text("open('MARKER', 'w')")
    (tmp_path / "d" / "state.pkl").write_bytes(b"cbuiltins\nopen\n(S'MARKER'\nS'w'\ntR.")
    assert texts(section("hf-saved", tmp_path / "d")) == TEXTS
    assert not (tmp_path / "MARKER").exists()


# The standard library


def test_python_stdlib_is_the_same_every_time_and_leaves_tests_out():
    source = open_source(section("python-stdlib"), Path("unused"))
    assert source.notes["licence"] == "PSF-2.0" and sys.version.split()[0] in source.notes["what"]
    first, second = ([(d.origin, d.text) for d in read(source)] for _ in range(2))
    assert first == second and len(first) > 400
    names = [name for name, _ in first]
    assert names == sorted(names) and "json/decoder.py" in names and "site.py" in names
    left_out = ("/test/", "/tests/", "/site-packages/", "/_sysconfigdata")
    assert not any(part in f"/{name}" for name in names for part in left_out)
    assert "does not use 'path'" in refused(section("python-stdlib", "x"), Path("unused"))


# Tokenised corpora


def write_megatron(prefix: Path, documents: list[list[int]]) -> None:
    kind, code = np.dtype("<u2"), 8
    lengths = [len(d) for d in documents]
    pointers = np.cumsum([0, *lengths[:-1]]) * kind.itemsize
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    head += len(documents).to_bytes(8, "little") + (len(documents) + 1).to_bytes(8, "little")
    bounds = np.arange(len(documents) + 1, dtype="<i8")
    index = head + np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(np.concatenate([np.array(d, kind) for d in documents]).tobytes())


def documents(store) -> list[list[int]]:
    return [store.document(i).tolist() for i in range(store.num_documents)]


def test_megatron_and_npy_become_verified_stores(tmp_path):
    tokenizer = bytes_tokenizer()
    write_megatron(tmp_path / "m", [[1, 2, 256], [3]])
    store = build(section("megatron", tmp_path), tokenizer, tmp_path / "s1")
    assert (
        documents(store) == [[1, 2, 256], [3, 256]] and store.num_bytes == 3
    )  # the end-of-document id is text of 0 bytes
    np.save(tmp_path / "rows.npy", np.array([[1, 2], [3, 256]]))
    assert documents(build(section("npy", tmp_path / "rows.npy"), tokenizer, tmp_path / "s2")) == [
        [1, 2, 256],
        [3, 256],
    ]
    np.save(tmp_path / "flat.npy", np.array([1, 2, 256, 3, 256, 4], dtype=np.uint16))
    flat = section("npy", tmp_path / "flat.npy")
    assert documents(build(flat, tokenizer, tmp_path / "s3")) == [[1, 2, 256, 3, 256, 4, 256]]
    cut = flat.model_copy(update={"options": {"eod_id": 256}})
    assert documents(build(cut, tokenizer, tmp_path / "s4")) == [[1, 2, 256], [3, 256], [4, 256]]


def test_bad_tokenised_inputs(tmp_path):
    out = tmp_path / "out"
    np.save(tmp_path / "a.npy", np.array([1, 300]))
    said = refused(section("npy", tmp_path / "a.npy"), out)
    assert "a.npy, document 0: holds id 300, outside the tokenizer's vocabulary of 257" in said
    np.save(tmp_path / "b.npy", np.array([1.0]))
    assert "b.npy" in refused(section("npy", tmp_path / "b.npy"), out)
    write_megatron(tmp_path / "m", [[1, 2]])
    assert "m.idx is not among the inputs" in refused(section("megatron", tmp_path / "m.bin"), out)
    for changes in ({"dedup": "near"},):
        assert "is tokenised already" in refused(section("megatron", tmp_path, **changes), out)


def test_c89_pickled_objects_in_npy_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Evil:
        def __reduce__(self):
            return open, ("MARKER", "w")

    np.save(tmp_path / "x.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    said = refused(section("npy", tmp_path / "x.npy"), tmp_path / "out")
    assert "x.npy" in said and not (tmp_path / "MARKER").exists()


# Sources of the user's own


def test_a_source_of_ones_own_by_import_path_needs_one_method(tmp_path, monkeypatch):
    (tmp_path / "my_corpus.py").write_text(
        "from truestep.data.sources.base import Document\n"
        "class Numbers:\n"
        "    def __init__(self, path, upto):\n"
        "        self.path, self.upto = path, upto\n"
        "    def documents(self):\n"
        "        for i in range(self.upto):\n"
        "            print('noise on stdout')\n"
        "            yield Document(f'{self.path} {i}', None, f'number {i}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = section("my_corpus:Numbers", "folder", options={"upto": 3})
    assert texts(mine) == ["folder 0", "folder 1", "folder 2"]
    for workers in (1, 2):
        store = build(mine, bytes_tokenizer(), tmp_path / f"s{workers}", workers=workers)
        assert store.num_documents == 3 and store.num_bytes == 24
    assert "needs options.upto" in refused(section("my_corpus:Numbers", "x"), tmp_path / "out")
    assert "does not use 'down'" in refused(section("my_corpus:Numbers", "x", options={"upto": 1, "down": 2}), tmp_path)
    (tmp_path / "my_gaps.py").write_text(
        "from truestep.data.sources.base import Document\n"
        "class Gaps:\n"
        "    def documents(self):\n"
        "        yield Document(None, None, 'row 5')\n"
    )
    assert "row 5: holds None, not text" in refused(section("my_gaps:Gaps"), tmp_path / "out")
    assert "has no 'Letters'" in refused(section("my_corpus:Letters"), tmp_path / "out")


def test_sources_are_pickled_to_other_processes(tmp_path):
    assert set(SOURCES) == {"text", "jsonl", "parquet", "hf-saved", "hf-hub", "python-stdlib", "megatron", "npy"}
    (tmp_path / "a.txt").write_text("x")
    for shard in open_source(section("text", tmp_path), tmp_path / "cache").shards():
        assert pickle.loads(pickle.dumps(shard)) == shard


def test_object_storage_goes_through_the_cache(tmp_path, monkeypatch):
    """The wiring alone; the cache itself is tested against real S3 servers in tests/storage."""
    remote = {"s3://b/x/1.jsonl": lines(["one"]), "s3://b/x/2.jsonl.gz": gzip.compress(lines(["two"]))}
    asked = []

    def expand(url, options):
        return [u for u in remote if u.startswith(url.rstrip("*"))]

    def fetch(url, options, cache):
        asked.append((url, options["region"]))
        path = Path(cache) / url.rsplit("/", 1)[-1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(remote[url])
        return path

    monkeypatch.setattr("truestep.data.sources.inputs.expand", expand)
    monkeypatch.setattr("truestep.data.sources.inputs.fetch", fetch)
    for path in ("s3://b/x/", "s3://b/x/*"):
        one = section("jsonl", path, storage_options={"region": "r"})
        assert texts(one, tmp_path) == ["one", "two"]
    assert texts(section("jsonl", "s3://b/x/2.jsonl.gz", storage_options={"region": "r"}), tmp_path) == ["two"]
    assert {region for _, region in asked} == {"r"}


@pytest.mark.s3
def test_a_build_from_s3_is_that_of_the_local_files(seaweed, tmp_path):
    store = ObjectStore(f"{seaweed.url}/{uuid.uuid4().hex}", seaweed.options)
    local = tmp_path / "local"
    local.mkdir()
    write_megatron(local / "m", [[1, 2], [3]])
    (local / "a.jsonl").write_bytes(lines(["one"]))
    (local / "b.jsonl.gz").write_bytes(gzip.compress(lines(["two", "three"])))
    for path in local.iterdir():
        store.put(f"data/{path.name}", path.read_bytes())
    for kind, path in (("jsonl", f"{store.url}/data/*.jsonl*"), ("megatron", f"{store.url}/data/")):
        remote = section(kind, path, storage_options=seaweed.options)
        here = build(section(kind, local), bytes_tokenizer(), tmp_path / f"{kind}-here", cache=tmp_path / "cache")
        there = build(remote, bytes_tokenizer(), tmp_path / f"{kind}-there", workers=2, cache=tmp_path / "cache")
        assert there.fingerprint == here.fingerprint
        assert not any(
            value in (tmp_path / f"{kind}-there" / "header.json").read_text() for value in ("secret", "key_id")
        )
    wrong = section("jsonl", f"{store.url}/none/*.jsonl", storage_options=seaweed.options)
    assert "no file matches" in refused(wrong, tmp_path / "out")


def test_missing_documents_are_not_read_as_empty(tmp_path):
    with pytest.raises(DataError):
        texts(section("text", tmp_path / "missing"))
