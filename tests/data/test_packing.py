"""Packing: every token is accounted for, and labels, positions and documents are what a naive loop makes."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.fakes import memory_store, numbered, sparse_store
from truestep.data import best_fit as best_fit_module
from truestep.data.best_fit import best_fit
from truestep.data.packing import IGNORE, BestFitPacking, Packing, Rows, SplitPacking, open_packing
from truestep.data.store import TokenStore
from truestep.errors import DataError, StorageError
from truestep.numerics import batch

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=25).filter(lambda ls: sum(ls) > 1)


def all_rows(packing: Packing) -> Rows:
    return packing.rows(np.arange(packing.num_rows))


def naive(pieces_of_rows: list[list[list[int]]], context: int, mask: bool) -> list[list[tuple[int, int, int, int]]]:
    """(token, label, position, document) of every place, from the pieces (up to T + 1 tokens a row) of every row."""
    rows = []
    for pieces in pieces_of_rows:
        places = [(t, p, d) for d, piece in enumerate(pieces) for p, t in enumerate(piece)]
        row = []
        for i, (token, position, document) in enumerate(places[:context]):
            label = IGNORE
            if i + 1 < len(places) and not (mask and places[i + 1][2] != document):
                label = places[i + 1][0]
            row.append((token, label, position, document) if mask else (token, label, i, 0))
        rows.append(row + [(0, IGNORE, 0, -1)] * (context - len(row)))
    return rows


def as_lists(rows: Rows) -> list[list[tuple[int, int, int, int]]]:
    stacked = np.stack([rows.tokens_BT, rows.labels_BT, rows.positions_BT, rows.documents_BT], axis=-1)
    return [[tuple(place) for place in row] for row in stacked.tolist()]


@settings(deadline=None)
@given(lengths, st.integers(1, 16), st.booleans())
def test_split_is_the_stream_cut_into_rows(ls: list[int], context: int, mask: bool):
    packing = SplitPacking(numbered(ls), context, mask)
    document_of = [d for d, n in enumerate(ls) for _ in range(n)]
    pieces_of_rows = []
    for start in range(0, sum(ls) - 1, context):
        pieces: dict[int, list[int]] = {}
        for i in range(start, min(start + context + 1, sum(ls))):
            pieces.setdefault(document_of[i], []).append(i + 1)
        pieces_of_rows.append(list(pieces.values()))
    rows = all_rows(packing)
    assert as_lists(rows) == naive(pieces_of_rows, context, mask)
    targets = rows.labels_BT[rows.labels_BT != IGNORE]
    first_tokens = set(np.cumsum([1, *ls[:-1]]).tolist()) if mask else {1}
    assert sorted(targets.tolist()) == [t for t in range(1, sum(ls) + 1) if t not in first_tokens]


@settings(deadline=None)
@given(lengths, st.integers(1, 16), st.booleans(), st.sampled_from(["truncate", "split"]))
def test_best_fit_keeps_documents_whole(
    tmp_path_factory: pytest.TempPathFactory, quick_disk: None, ls: list[int], context: int, mask: bool, too_long: str
):
    folder = tmp_path_factory.mktemp("index")
    packing = BestFitPacking(numbered(ls), context, mask, too_long, folder)
    rows = all_rows(packing)
    starts, piece_lengths, row_of = packing._index.pieces(np.arange(packing.num_rows))
    pieces_of_rows: list[list[list[int]]] = [[] for _ in range(packing.num_rows)]
    for start, length, row in zip(starts.tolist(), piece_lengths.tolist(), row_of.tolist()):
        pieces_of_rows[row].append(list(range(start + 1, start + 1 + length)))
    assert as_lists(rows) == naive(pieces_of_rows, context, mask)
    kept = Counter(int(t) for pieces in pieces_of_rows for piece in pieces for t in piece)
    report = packing.report
    assert report["tokens_in"] == sum(ls) == report["tokens_out"] + report["dropped_tokens"]
    assert len(kept) == report["tokens_out"]
    places = rows.documents_BT >= 0
    assert report["padding_tokens"] == (~places).sum()
    if too_long == "truncate":
        document_starts = set(np.cumsum([0, *ls[:-1]]).tolist())
        assert set(starts.tolist()) <= document_starts
        assert set(kept.values()) <= {1}
    else:
        assert report["dropped_tokens"] == 0
        if mask:  # every token but the first of a document is a target once
            targets = rows.labels_BT[rows.labels_BT != IGNORE]
            first_tokens = set(np.cumsum([1, *ls[:-1]]).tolist())
            assert sorted(targets.tolist()) == [t for t in range(1, sum(ls) + 1) if t not in first_tokens]


@settings(deadline=None)
@given(lengths, st.integers(1, 16), st.booleans(), st.sampled_from(["split", "best-fit"]), st.data())
def test_targets_are_counted_without_reading(
    tmp_path_factory: pytest.TempPathFactory,
    quick_disk: None,
    ls: list[int],
    context: int,
    mask: bool,
    kind: str,
    data: st.DataObject,
):
    packing = open_packing(kind, numbered(ls), context, mask, "split", tmp_path_factory.mktemp("index"))
    indices = np.array(data.draw(st.lists(st.integers(0, packing.num_rows - 1), min_size=1, max_size=8)))
    rows = packing.rows(indices)
    assert packing.targets(indices) == (rows.labels_BT != IGNORE).sum()
    assert as_lists(rows) == [as_lists(all_rows(packing))[i] for i in indices]


@given(st.lists(st.integers(1, 20), max_size=80))
def test_best_fit_equals_the_item_by_item_rule(items: list[int]):
    bin_of, num_bins = best_fit(np.array(items, dtype=np.int64), 20)
    rooms: list[int] = []
    for item in sorted(items, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= item]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= item
        else:
            rooms.append(20 - item)
    filled = np.bincount(bin_of, items, minlength=num_bins) if items else np.zeros(0)
    assert num_bins == len(rooms)
    assert sorted(20 - filled) == sorted(rooms)


def test_c01_truncate_reports_what_it_drops(tmp_path: Path):
    packing = open_packing("best-fit", numbered([5, 2, 3, 1]), 4, True, "truncate", tmp_path)
    assert packing.num_rows == 3
    rows = all_rows(packing)
    assert [row[row > 0].tolist() for row in rows.tokens_BT] == [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]]
    assert packing.report["tokens_in"] == 11 and packing.report["tokens_out"] == 10
    assert packing.report["dropped_tokens"] == 1 and packing.report["truncated_documents"] == 1


def test_c01_split_keeps_all(tmp_path: Path):
    for kind in ("split", "best-fit"):
        packing = open_packing(kind, numbered([5, 2, 3, 1]), 4, True, "split", tmp_path)
        assert packing.num_rows == 3
        rows = all_rows(packing)
        seen = set(rows.tokens_BT[rows.documents_BT >= 0].tolist()) | set(rows.labels_BT[rows.labels_BT > 0].tolist())
        assert seen == set(range(1, 12))
        assert packing.report["tokens_in"] == packing.report["tokens_out"] == 11
        assert packing.report["dropped_tokens"] == 0


def test_c01_no_row_begins_within_a_sample(tmp_path: Path):
    """Every fragment of a best-fit row starts at its document's first token, the prompt."""
    packing = open_packing("best-fit", numbered([9, 2, 7, 4, 12, 3]), 5, True, "truncate", tmp_path)
    rows = all_rows(packing)
    first_tokens = {1, 10, 12, 19, 23, 35}
    begins = (rows.positions_BT == 0) & (rows.documents_BT >= 0)
    assert set(rows.tokens_BT[begins].tolist()) == first_tokens


def test_c01_refuse_names_the_document(tmp_path: Path):
    with pytest.raises(DataError, match=r"memory: document 0 has 5 tokens, more than a row of 4 \(1 such documents\)"):
        open_packing("best-fit", numbered([5, 2, 3, 1]), 4, True, "refuse", tmp_path)
    assert not list(tmp_path.iterdir())
    packing = open_packing("best-fit", numbered([4, 2, 3, 1]), 4, True, "refuse", tmp_path)
    assert packing.report["dropped_tokens"] == 0


def test_c06_attention_stays_within_documents():
    rows = all_rows(SplitPacking(memory_store([[1, 1], [5, 5]]), 4, True))
    values, documents = rows.tokens_BT[0].astype(float), rows.documents_BT[0]
    sees = (documents[:, None] == documents[None, :]) & np.tri(4, dtype=bool)
    assert ((sees * values).sum(1) / sees.sum(1)).tolist() == [1, 1, 5, 5]


def test_c06_the_border_label_is_dropped():
    rows = all_rows(SplitPacking(memory_store([[1, 2, 3], [4, 5]]), 5, True))
    assert rows.labels_BT.tolist() == [[2, 3, IGNORE, 5, IGNORE]]
    assert rows.positions_BT.tolist() == [[0, 1, 2, 0, 1]]
    assert rows.documents_BT.tolist() == [[0, 0, 0, 1, 1]]


def test_c06_another_documents_tokens_change_nothing():
    one = all_rows(SplitPacking(memory_store([[1, 2, 3], [4, 5]]), 5, True))
    two = all_rows(SplitPacking(memory_store([[7, 8, 9], [4, 5]]), 5, True))
    for field in ("tokens_BT", "labels_BT", "positions_BT", "documents_BT"):
        assert getattr(one, field)[0, 3:].tolist() == getattr(two, field)[0, 3:].tolist()


def test_c08_padding_like_the_end_id_hides_no_end():
    """The filler is id 0 and so is this corpus's end-of-document id."""
    rows = all_rows(SplitPacking(memory_store([[5, 6, 0]]), 5, True))
    assert rows.tokens_BT.tolist() == [[5, 6, 0, 0, 0]]
    assert rows.labels_BT.tolist() == [[6, 0, IGNORE, IGNORE, IGNORE]]
    assert rows.documents_BT.tolist() == [[0, 0, 0, -1, -1]]


def test_one_ignore_value():
    assert IGNORE == batch.IGNORE


def test_documents_of_no_tokens_are_passed_over(tmp_path: Path):
    """Foreign files may have them."""
    store = memory_store([[1, 2], [], [], [3, 4], []])
    packing = SplitPacking(store, 4, True)
    assert all_rows(packing).labels_BT.tolist() == [[2, IGNORE, 4, IGNORE]]
    assert packing.targets(np.array([0])) == 2
    assert all_rows(BestFitPacking(store, 4, True, "refuse", tmp_path)).documents_BT.tolist() == [[0, 0, 1, 1]]


def test_too_little_for_one_target(tmp_path: Path):
    with pytest.raises(DataError, match="holds 1 tokens, too few for one target"):
        SplitPacking(memory_store([[1]]), 4, True)
    with pytest.raises(DataError, match="holds no tokens"):
        BestFitPacking(memory_store([]), 4, True, "truncate", tmp_path)


def test_unordered_offsets_are_seen(tmp_path: Path):
    offsets = np.array([0, 9, 4, 12])
    store = TokenStore(Path("bad"), np.arange(12), lambda i: offsets[i], 3, "", {})
    with pytest.raises(DataError, match="bad: document offsets do not increase"):
        SplitPacking(store, 6, True).rows(np.arange(2))
    with pytest.raises(DataError, match="bad: document offsets do not increase"):
        BestFitPacking(store, 6, True, "truncate", tmp_path)


def test_the_index_is_made_once_and_checked(tmp_path: Path):
    store = numbered([3, 4, 5, 6] * 20)
    first = all_rows(BestFitPacking(store, 8, True, "truncate", tmp_path))
    (folder,) = tmp_path.iterdir()
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    second = all_rows(BestFitPacking(store, 8, True, "truncate", tmp_path))
    assert as_lists(first) == as_lists(second)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    raw = bytearray((folder / "starts.bin").read_bytes())
    raw[8] ^= 1
    (folder / "starts.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"starts\.bin: block 0 .* does not match its checksum"):
        all_rows(BestFitPacking(store, 8, True, "truncate", tmp_path))


def test_the_first_of_two_builders_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second finds the index there when it is done; it takes it and leaves nothing of its own."""
    store, publish = numbered([3, 4, 5, 6] * 20), best_fit_module._publish

    def another_is_first(partial: Path, path: Path) -> None:
        shutil.copytree(partial, path)
        publish(partial, path)

    monkeypatch.setattr(best_fit_module, "_publish", another_is_first)
    assert BestFitPacking(store, 8, True, "truncate", tmp_path).num_rows > 0
    assert len(list(tmp_path.iterdir())) == 1


def test_an_index_that_cannot_be_kept_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"cannot write \(No space left on device\)"):
        BestFitPacking(numbered([3, 4]), 8, True, "truncate", tmp_path)
    assert not list(tmp_path.iterdir())


def test_split_rows_of_a_huge_store_cost_the_same(tmp_path: Path):
    store = sparse_store(tmp_path / "s", np.arange(0, 5_000_000_001, 50_000))
    packing = SplitPacking(store, 4096, True)
    rows = packing.rows(np.array([0, packing.num_rows // 2, packing.num_rows - 1]))
    assert packing.num_rows == -(-(5_000_000_000 - 1) // 4096)
    assert rows.labels_BT[2, -1] == IGNORE
