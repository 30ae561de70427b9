"""Marks beside commits: the last of a pair counts, damaged ones protect, readers pass quarantined checkpoints over."""

import pytest
import torch

from tests.checkpoint.common import save_one
from truestep.checkpoint.catalogue import Committed, begin_epoch, list_committed, newest, read_catalogue
from truestep.checkpoint.load import load_newest
from truestep.checkpoint.marks import (
    PAIRS,
    forget_marks,
    mark,
    marks_of,
    marks_on,
    pinned,
    quarantined,
    standing,
)
from truestep.checkpoint.sealed import seal
from truestep.errors import CheckpointError
from truestep.storage.local import LocalStore
from truestep.storage.objects import ObjectStore

ONE, TWO = Committed(1, 1), Committed(2, 2)


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return LocalStore(tmp_path / "store") if request.param == "folder" else ObjectStore("memory://")


def _save_two(store):
    for step in (1, 2):
        assert save_one(store, step, {"w": torch.full((3,), float(step))}).ok


def _replace(store, key, data):
    store.delete(key)
    store.put(key, data)


def _flip(store, key):
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    _replace(store, key, bytes(data))


def test_last_of_a_pair_counts(store):
    for kind, end in PAIRS.items():
        expected = []
        for step, one_of in enumerate([kind, end, end, kind, kind, end]):
            mark(store, ONE, one_of)
            expected.append(one_of == kind)
            found = standing(marks_on(store, ONE))
            said = {"quarantined": found.quarantined is not None, "pinned": found.pinned, "deleting": found.deleting}
            assert said[kind] is expected[-1], (kind, step)
    assert [each.number for each in marks_of(store)[ONE]] == list(range(1, 19))


def test_facts_and_levels(store):
    mark(store, ONE, "verified", level="written")
    assert not standing(marks_on(store, ONE)).is_verified
    mark(store, ONE, "verified", level="scrub", seconds=1.5)
    mark(store, TWO, "drilled", level="load", world=3)
    found = {committed: standing(marks) for committed, marks in marks_of(store).items()}
    assert (found[ONE].verified, found[ONE].is_verified, found[ONE].drilled) == ("scrub", True, None)
    assert (found[TWO].verified, found[TWO].drilled.facts["world"]) == ("load", 3)
    assert marks_of(store, ["drilled"]).keys() == {TWO}
    with pytest.raises(CheckpointError, match="'checked' is not a kind of mark"):
        mark(store, ONE, "checked")


def test_readers_pass_quarantined_over_loudly(store):
    _save_two(store)
    mark(store, TWO, "quarantined", reason="a drill found 3 damaged blocks")
    assert quarantined(store) == {TWO.key}
    for _ in range(2):  # also after the next attempt began
        assert newest(store) == ONE
        loaded = load_newest(store, {"w": torch.zeros(3)})
        assert loaded.step == 1
        assert loaded.fell_back == [f"passed over {TWO.key}: it is quarantined (a drill found 3 damaged blocks)"]
        begin_epoch(store)
    assert list_committed(store) == [ONE, TWO]
    mark(store, TWO, "released")
    assert quarantined(store) == set() and newest(store) == TWO
    assert load_newest(store, {"w": torch.zeros(3)}).fell_back == []


def test_all_quarantined_is_no_start_from_nothing(store):
    _save_two(store)
    for committed in (ONE, TWO):
        mark(store, committed, "quarantined", reason="test")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be loaded: passed over .* it is quarantined"):
        load_newest(store, {"w": torch.zeros(3)})


@pytest.mark.parametrize("spoil", ["flip", "empty", "swap"])
def test_damaged_marks_protect(store, spoil):
    def damage(committed, made):
        key = f"marks/{committed.name}/{made.kind}-{made.number:06d}"
        if spoil == "flip":
            _flip(store, key)
        else:
            other = mark(store, Committed(9, 9), made.kind)
            data = store.get(f"marks/{Committed(9, 9).name}/{other.kind}-{other.number:06d}")
            _replace(store, key, data if spoil == "swap" else b"")
            forget_marks(store, Committed(9, 9))

    damage(ONE, mark(store, ONE, "quarantined", reason="test"))
    damage(ONE, mark(store, ONE, "pinned"))
    damage(ONE, mark(store, ONE, "verified", level="scrub"))
    assert quarantined(store) == {ONE.key} and pinned(store) == {ONE.key}
    found = standing(marks_on(store, ONE))
    assert (found.quarantined, found.pinned, found.verified) == ("its mark is damaged", True, None)
    assert found.notes[0] == "its mark quarantined-000001 is damaged" and len(found.notes) == 3
    damage(ONE, mark(store, ONE, "released"))
    damage(ONE, mark(store, ONE, "unpinned"))
    assert quarantined(store) == {ONE.key} and pinned(store) == {ONE.key}
    mark(store, ONE, "released")
    mark(store, ONE, "unpinned")
    assert quarantined(store) == set() and pinned(store) == set()


def test_marks_made_at_once_are_all_kept(tmp_path):
    store, rival = LocalStore(tmp_path), LocalStore(tmp_path)
    asked = []

    def event(name):
        asked.append(name)
        if asked == ["mark pinned to be created"]:
            mark(rival, ONE, "pinned", by="rival")

    store.event = event
    mark(store, ONE, "pinned", by="us")
    assert [(each.number, each.facts["by"]) for each in marks_on(store, ONE)] == [(1, "rival"), (2, "us")]


def test_a_tie_protects(store):
    """Two processes may take the same number for the two of a pair, whose keys differ."""
    mark(store, ONE, "pinned")
    body = {"commit": ONE.key, "kind": "unpinned", "number": 1, "at_s": 1.0, "facts": {}}
    store.put(f"marks/{ONE.name}/unpinned-000001", seal(body))
    assert not any(each.damaged for each in marks_on(store, ONE)) and pinned(store) == {ONE.key}
    store.put(f"marks/{ONE.name}/unpinned-000002", seal(body | {"number": 2}))
    assert pinned(store) == set()


def test_deleted_on_purpose_is_not_lost(store):
    _save_two(store)
    begin_epoch(store)
    store.delete(ONE.key)
    assert read_catalogue(store).lost == [ONE]
    mark(store, ONE, "deleting")
    assert read_catalogue(store).lost == []
    mark(store, ONE, "kept")
    assert read_catalogue(store).lost == [ONE]


def test_forgotten_marks_go_the_reason_of_absence_last(store):
    for kind in ("deleting", "pinned", "verified"):
        mark(store, ONE, kind, level="scrub")
    gone = []
    delete = store.delete
    store.delete = lambda key: (gone.append(key.split("/")[-1].split("-")[0]), delete(key))
    forget_marks(store, ONE)
    assert gone == ["pinned", "verified", "deleting"] and marks_of(store) == {}
