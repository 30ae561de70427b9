"""TokenStore: what is written comes back, nothing wraps, and no changed byte is read."""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.fakes import EOD, make_store, merge_stores, sparse_store
from truestep.data.foreign import open_megatron, open_npy
from truestep.data.store import StoreWriter, TokenStore, id_type
from truestep.errors import DataError, StorageError

documents = st.lists(st.lists(st.integers(1, 999), min_size=1, max_size=40), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, quick_disk: None) -> Path:
    return tmp_path_factory.mktemp("stores")


def fresh(folder: Path) -> Path:
    path = folder / "store"
    shutil.rmtree(path, ignore_errors=True)
    return path


def contents(store: TokenStore) -> list[list[int]]:
    return [store.document(i).tolist() for i in range(store.num_documents)]


@settings(deadline=None)
@given(documents)
def test_documents_come_back_each_ended_once(folder: Path, docs: list[list[int]]):
    store = make_store(fresh(folder), docs)
    assert contents(store) == [[*ids, EOD] for ids in docs]
    assert store.num_tokens == sum(map(len, docs)) + len(docs)
    assert store.num_bytes == sum(map(len, docs))
    where = store.document_at(np.arange(store.num_tokens))
    assert where.tolist() == [i for i, ids in enumerate(docs) for _ in range(len(ids) + 1)]
    store.verify()


def test_a_document_that_ends_itself_gets_no_second_end(tmp_path: Path):
    assert contents(make_store(tmp_path / "s", [[5, EOD], [EOD]])) == [[5, EOD], [EOD]]


@settings(deadline=None)
@given(documents, st.integers(1, 4))
def test_merging_shards_equals_writing_at_once(folder: Path, docs: list[list[int]], num_shards: int):
    shutil.rmtree(folder / "parts", ignore_errors=True)
    shards = [make_store(folder / "parts" / str(i), docs[i::num_shards]) for i in range(num_shards)]
    merged = merge_stores(fresh(folder), shards, {"shards": num_shards})
    whole = make_store(folder / "parts" / "whole", [ids for i in range(num_shards) for ids in docs[i::num_shards]])
    assert contents(merged) == contents(whole)
    assert merged.fingerprint == whole.fingerprint
    assert merged.header["report"] == {"shards": num_shards}


def test_fingerprint_changes_with_tokens_and_borders_not_with_the_report(tmp_path: Path):
    names = [[[1, 2], [3]], [[1, 2], [4]], [[1], [2, 3]]]
    assert len({make_store(tmp_path / str(i), docs).fingerprint for i, docs in enumerate(names)}) == 3
    with StoreWriter(tmp_path / "other", 1000, EOD, block_bytes=64) as writer:
        writer.append_many([np.array([1, 2]), np.array([3])], 3)
        store = writer.finish({"seconds": 1.5})
    assert store.fingerprint == TokenStore.open(tmp_path / "0").fingerprint


def test_c03_ids_do_not_wrap(tmp_path: Path):
    with StoreWriter(tmp_path / "wide", 70_002, EOD) as writer:
        writer.append(np.array([70_001]), 1)
        store = writer.finish({})
    assert contents(store) == [[70_001, EOD]] and store.header["id_type"] == "<u4"
    sentence = "id 70001 in document 1 is outside a vocabulary of 65536"
    with pytest.raises(DataError, match=sentence), StoreWriter(tmp_path / "narrow", 65_536, EOD) as writer:
        writer.append(np.array([65_535]), 1)
        writer.append(np.array([70_001]), 1)
    assert not (tmp_path / "narrow").exists()


def test_c03_width_follows_the_largest_id(tmp_path: Path):
    assert id_type(65_536) == np.uint16 and id_type(65_537) == np.uint32
    for vocab_size, width in [(65_536, "<u2"), (65_537, "<u4")]:
        with StoreWriter(tmp_path / str(vocab_size), vocab_size, EOD) as writer:
            writer.append(np.array([vocab_size - 1]), 1)
            store = writer.finish({})
        assert json.loads((store.path / "header.json").read_text())["id_type"] == width
        assert store.document(0).tolist() == [vocab_size - 1, EOD]


def test_c03_offsets_pass_two_to_the_31(tmp_path: Path):
    store = sparse_store(tmp_path / "s", np.array([0, 1_200_000_000, 2_400_000_000, 2_400_000_010]))
    assert store.offsets_at(np.array([2])).tolist() == [2_400_000_000]
    assert store.document_at(np.array([2_399_999_999, 2_400_000_000])).tolist() == [1, 2]
    assert store.document(2).tolist() == [0] * 10


def test_opening_10_gb_takes_no_memory(tmp_path: Path):
    sparse_store(tmp_path / "s", np.arange(0, 5_000_000_001, 50_000))
    tracemalloc.start()
    store = TokenStore.open(tmp_path / "s")
    ids = store.read(np.arange(100) * 49_000_000, np.full(100, 1024))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert store.num_tokens * 2 == 10**10 and len(ids) == 102_400
    assert peak_bytes < 2_000_000


@settings(deadline=None)
@given(st.data())
def test_a_flipped_bit_is_never_read(folder: Path, data: st.DataObject):
    docs = [list(range(1, 50))] * 6
    path = fresh(folder)
    good = make_store(path, docs)
    expected = contents(good)
    name = data.draw(st.sampled_from(["tokens.bin", "offsets.bin", "checksums.bin", "header.json"]))
    file = path / name
    raw = bytearray(file.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    with pytest.raises(DataError, match=r"build the data again|build the data$"):
        store = TokenStore.open(path)
        for i, want in enumerate(expected):  # before the flipped block, all is still right
            assert store.document(i).tolist() == want
        store.verify()


def test_a_flipped_block_is_named_on_first_touch_only_there(tmp_path: Path):
    make_store(tmp_path / "s", [list(range(1, 101))], block_bytes=64)
    file = tmp_path / "s" / "tokens.bin"
    raw = bytearray(file.read_bytes())
    raw[70] ^= 4
    file.write_bytes(raw)
    store = TokenStore.open(tmp_path / "s")
    assert store.read(np.array([0]), np.array([32])).tolist() == list(range(1, 33))
    with pytest.raises(DataError, match=r"tokens\.bin: block 1 \(bytes 64 to 128\) does not match its checksum"):
        store.read(np.array([0]), np.array([33]))
    with pytest.raises(DataError, match=r"block 1 "):
        store.verify()


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "checksums.bin", "header.json"])
def test_truncated_or_missing_files_are_named(tmp_path: Path, name: str):
    make_store(tmp_path / "s", [[1, 2, 3]] * 20)
    file = tmp_path / "s" / name
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match=name):
        TokenStore.open(tmp_path / "s")
    file.unlink()
    with pytest.raises(DataError, match=name):
        TokenStore.open(tmp_path / "s")


def test_absent_and_unfinished_stores(tmp_path: Path):
    with pytest.raises(DataError, match=r"nowhere: does not exist .*; build the data first"):
        TokenStore.open(tmp_path / "nowhere")
    writer = StoreWriter(tmp_path / "s", 100, EOD)
    writer.append(np.array([1]), 1)
    with pytest.raises(DataError, match=r"was not finished .*; build the data first"):
        TokenStore.open(tmp_path / "s")
    writer.abort()
    assert not (tmp_path / "s").exists()


def test_an_error_while_writing_leaves_nothing(tmp_path: Path):
    with pytest.raises(RuntimeError), StoreWriter(tmp_path / "s", 100, EOD) as writer:
        writer.append(np.array([1]), 1)
        raise RuntimeError("the source failed")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "ids, sentence",
    [
        (np.array([], dtype=np.int64), r"document 0 has type int64 and shape \(0,\)"),
        (np.array([1.0]), "document 0 has type float64"),
        (np.array([[1]]), r"shape \(1, 1\)"),
        (np.array([-1]), "id -1 in document 0 is outside a vocabulary of 100"),
        (np.array([100]), "id 100 in document 0 is outside a vocabulary of 100"),
        (np.array([2**64 - 1], dtype=np.uint64), "outside a vocabulary of 100"),
    ],
)
def test_bad_documents_are_refused(tmp_path: Path, ids: np.ndarray, sentence: str):
    with pytest.raises(DataError, match=sentence), StoreWriter(tmp_path / "s", 100, EOD) as writer:
        writer.append(ids, 0)
    assert not (tmp_path / "s").exists()


def test_a_finished_store_is_not_overwritten(tmp_path: Path):
    make_store(tmp_path / "s", [[1]])
    with pytest.raises(DataError, match="already holds a token store"):
        StoreWriter(tmp_path / "s", 100, EOD)
    assert contents(TokenStore.open(tmp_path / "s")) == [[1, EOD]]


def test_shards_of_another_tokenizer_do_not_merge(tmp_path: Path):
    shards = [make_store(tmp_path / "a", [[1]]), make_store(tmp_path / "b", [[1]], vocab_size=999)]
    with pytest.raises(DataError, match="cannot be merged"):
        merge_stores(tmp_path / "m", shards, {})
    assert not (tmp_path / "m").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    sentence = r"s: cannot write \(No space left on device\); free space"
    with pytest.raises(StorageError, match=sentence), StoreWriter(tmp_path / "s", 100, EOD) as writer:
        writer.append(np.array([1]), 1)
        monkeypatch.setattr("os.fsync", full)
        writer.finish({})
    assert not (tmp_path / "s").exists()


def test_a_path_that_cannot_be_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot write"):
        StoreWriter(tmp_path / "file" / "s", 100, EOD)


def test_an_empty_shard_is_allowed_and_adds_nothing(tmp_path: Path):
    empty, full = make_store(tmp_path / "e", []), make_store(tmp_path / "f", [[1, 2]])
    assert empty.num_tokens == empty.num_documents == 0
    assert contents(merge_stores(tmp_path / "m", [empty, full, empty], {})) == [[1, 2, EOD]]


def write_megatron(prefix: Path, sequences: list[list[int]], bounds: list[int], code: int, dtype: str) -> None:
    lengths = np.array([len(s) for s in sequences])
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    head += len(sequences).to_bytes(8, "little") + len(bounds).to_bytes(8, "little")
    body = lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(head + body)
    prefix.with_name(prefix.name + ".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())


@pytest.mark.parametrize("code, dtype", [(8, "<u2"), (4, "<i4")])
def test_megatron_pairs_open_without_copying(tmp_path: Path, code: int, dtype: str):
    sequences = [[1, 2, 3], [4], [60_000, 5]]
    write_megatron(tmp_path / "corpus.v1", sequences, [0, 1, 2, 3], code, dtype)
    store = open_megatron(tmp_path / "corpus.v1", vocab_size=60_001, eod_id=5)
    assert contents(store) == sequences and store.num_tokens == 6 and store.num_bytes is None
    assert store.document_at(np.arange(6)).tolist() == [0, 0, 0, 1, 2, 2]
    with pytest.raises(DataError, match="holds id 60000, outside a vocabulary of 60000"):
        open_megatron(tmp_path / "corpus.v1", vocab_size=60_000).document(2)


def test_megatron_documents_of_several_sequences(tmp_path: Path):
    write_megatron(tmp_path / "c", [[1, 2], [3], [4, 5, 6]], [0, 2, 3], 8, "<u2")
    assert contents(open_megatron(tmp_path / "c")) == [[1, 2, 3], [4, 5, 6]]


def test_damaged_megatron_pairs_are_refused(tmp_path: Path):
    write_megatron(tmp_path / "c", [[1, 2], [3]], [0, 1, 2], 8, "<u2")
    good_bin, good_idx = (tmp_path / "c.bin").read_bytes(), (tmp_path / "c.idx").read_bytes()
    (tmp_path / "c.bin").write_bytes(good_bin[:-2])
    with pytest.raises(DataError, match=r"c\.bin: has 4 bytes where its index says 6"):
        open_megatron(tmp_path / "c")
    (tmp_path / "c.idx").write_bytes(good_idx[:-8])
    with pytest.raises(DataError, match=r"c\.idx: has .* truncated"):
        open_megatron(tmp_path / "c")
    (tmp_path / "c.idx").write_bytes(b"something else")
    with pytest.raises(DataError, match="is not an index of a Megatron dataset"):
        open_megatron(tmp_path / "c")
    with pytest.raises(DataError, match=r"none\.idx: cannot be read"):
        open_megatron(tmp_path / "none")


def test_npy_one_and_two_dimensions(tmp_path: Path):
    np.save(tmp_path / "flat.npy", np.arange(10, dtype=np.uint32))
    np.save(tmp_path / "rows.npy", np.arange(10, dtype=np.uint16).reshape(2, 5))
    assert contents(open_npy(tmp_path / "flat.npy")) == [list(range(10))]
    rows = open_npy(tmp_path / "rows.npy", vocab_size=10)
    assert contents(rows) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert rows.fingerprint != open_npy(tmp_path / "flat.npy").fingerprint


def test_bad_npy_files(tmp_path: Path):
    np.save(tmp_path / "floats.npy", np.ones(3))
    with pytest.raises(DataError, match=r"floats\.npy: holds float64 of shape \(3,\)"):
        open_npy(tmp_path / "floats.npy")
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    with pytest.raises(DataError, match=r"objects\.npy: is no readable"):
        open_npy(tmp_path / "objects.npy")
    np.save(tmp_path / "cut.npy", np.arange(100))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-8])
    with pytest.raises(DataError, match=r"cut\.npy: is no readable"):
        open_npy(tmp_path / "cut.npy")
    with pytest.raises(DataError, match=r"none\.npy: cannot be read"):
        open_npy(tmp_path / "none.npy")
