"""Retention: what may go, in an order that no crash can spoil; a model check over all schedules of what happens."""

import contextlib
import shutil
import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.checkpoint.small import At, Crash, Unsynced, assert_whole, crash, spoil, tiny_save
from truestep.checkpoint import upkeep as upkeep_module
from truestep.checkpoint.catalogue import begin_epoch, commit, list_committed, newest, read_catalogue, read_commit
from truestep.checkpoint.marks import mark, marks_of, marks_on, pinned, quarantined, standing
from truestep.checkpoint.retention import Policy, fates, pin, retain
from truestep.checkpoint.sealed import Committed
from truestep.checkpoint.upkeep import Upkeep, verify_and_mark
from truestep.checkpoint.verify import verify
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import silent
from truestep.storage.local import LocalStore
from truestep.storage.objects import ObjectStore


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return LocalStore(tmp_path / "store", disk=Unsynced()) if request.param == "folder" else ObjectStore("memory://")


def _saves(store, *steps, verified=()):
    """One attempt that saved these steps."""
    epoch = begin_epoch(store).number
    made = [tiny_save(store, step, epoch) for step in steps]
    for committed in made:
        if committed.step in verified:
            assert verify_and_mark(store, committed) == []
    return made


def _steps(store):
    return [each.step for each in list_committed(store)]


def _left(store):
    """Step folders in which anything is left."""
    return {entry.key.split("/")[1] for entry in store.list("steps")}


def test_deletes_only_what_enough_verified_ones_follow(store):
    _saves(store, 10, 20, 30, 40, 50, verified=(20, 40, 50))
    assert retain(store, Policy(0)).deleted == []
    done = retain(store, Policy(2))
    assert _steps(store) == [40, 50] and [key[8:20].lstrip("0") for key in done.deleted] == ["10", "20", "30"]
    assert done.kept == 2 and done.notes == [] and done.num_bytes > 3 * 16
    assert len(_left(store)) == 2 and {c.step for c in marks_of(store)} == {40, 50}
    assert_whole(store)


def test_unverified_ones_protect_nothing(store):
    made = _saves(store, 10, 20, 30, 40, verified=(20,))
    mark(store, made[2], "verified", level="written")
    assert _steps(store) == [10, 20, 30, 40]
    retain(store, Policy(1))
    assert _steps(store) == [20, 30, 40]
    retain(store, Policy(2))
    assert _steps(store) == [20, 30, 40]


def test_pinned_restored_every_and_quarantined(store):
    made = _saves(store, 10, 20, 30, 40, 50, 60, 70, verified=range(80))
    pin(store, made[0], by="a test")
    mark(store, made[6], "quarantined", reason="a test")  # does not count, and is not the newest that protects
    said = {f.committed.step: f.kept for f in fates(store, Policy(1, 30), restored=[made[1].key])}
    assert said == {
        10: "it is pinned",
        20: "the run went on from it",
        30: "every 30 steps one is kept",
        40: "",
        50: "",
        60: "it is the newest",
        70: "0 newer ones are verified, 1 are to be kept",
    }
    retain(store, Policy(1, 30), restored=[made[1].key])
    assert _steps(store) == [10, 20, 30, 60, 70]
    mark(store, made[0], "unpinned")
    mark(store, made[5], "quarantined", reason="a test")
    mark(store, made[6], "released")
    retain(store, Policy(1, 30))
    assert _steps(store) == [30, 70], "a quarantined one goes in its time, and none is kept for its step's number"


def test_marks_of_the_deleted_stay_while_the_epoch_names_them(store):
    _saves(store, 10, 20, verified=(10, 20))
    begin_epoch(store)
    tiny_save(store, 30, 2)
    retain(store, Policy(1))
    assert _steps(store) == [20, 30]
    assert read_catalogue(store).lost == [] and read_catalogue(store).gone == [Committed(10, 1)]
    begin_epoch(store)
    assert read_catalogue(store).gone == [] and Committed(10, 1) in marks_of(store)
    retain(store, Policy(1))
    assert Committed(10, 1) not in marks_of(store)


def test_a_superseded_attempt_deletes_nothing(store):
    _saves(store, 10, 20, 30, verified=(10, 20, 30))
    begin_epoch(store)
    done = retain(store, Policy(1), epoch=1)
    assert done.deleted == [] and "epoch 1 was superseded by 2" in done.notes[0] and _steps(store) == [10, 20, 30]
    assert not any(standing(marks).deleting for marks in marks_of(store).values())
    assert len(retain(store, Policy(1), epoch=2).deleted) == 2


def test_a_damaged_commit_is_left_alone_and_said(store):
    made = _saves(store, 10, 20, 30, verified=(20, 30))
    store.delete(made[0].key)
    store.put(made[0].key, b"{}")
    done = retain(store, Policy(1))
    assert [key[8:20].lstrip("0") for key in done.deleted] == ["20"] and "damaged" in done.notes[0]
    assert made[0] in list_committed(store)


def test_a_commit_that_names_anothers_folder_deletes_nothing_of_it(store):
    made = _saves(store, 10, 20, verified=(10, 20))
    record = read_commit(store, made[1])
    commit(store, Committed(5, 1), record.manifest, record.sha256)
    done = retain(store, Policy(1))
    assert done.deleted == [made[0].key] and "names objects of another save" in done.notes[0]
    assert verify(store, made[1]) == [] and not standing(marks_on(store, Committed(5, 1))).deleting


def test_two_that_delete_the_same(tmp_path):
    """Between the mark and the look of one, another deletes it all: it is gone on purpose, and not lost."""
    store, rival = (LocalStore(tmp_path, disk=Unsynced()) for _ in range(2))
    made = _saves(store, 10, 20, verified=(10, 20))
    begin_epoch(store)
    store.event = At(lambda: retain(rival, Policy(1)), "deletion marked")
    done = retain(store, Policy(1))
    assert done.deleted == [] and f"{made[0].key}: is gone already" in done.notes[0]
    assert _steps(store) == [20] and len(_left(store)) == 1
    assert read_catalogue(store).lost == [] and read_catalogue(store).gone == [made[0]]
    begin_epoch(store)
    retain(store, Policy(1))
    assert made[0] not in marks_of(store)


def _retained_with(tmp_path, name, act, k):
    """Three verified checkpoints of two attempts, two of which go; `act` at the k-th event of that."""
    if not (tmp_path / "before").exists():
        before = LocalStore(tmp_path / "before", disk=Unsynced())
        _saves(before, 10, 20, verified=(10, 20))
        _saves(before, 30, verified=(30,))
    shutil.copytree(tmp_path / "before", tmp_path / name)
    store = LocalStore(tmp_path / name, disk=Unsynced())
    store.event = hook = At(act, k)
    with contextlib.suppress(Crash):
        retain(store, Policy(1))
    store.event = silent
    return store, hook.names


def test_c38_a_crash_at_every_event_leaves_whole_checkpoints(tmp_path):
    _, names = _retained_with(tmp_path, "count", crash, 0)
    assert len(names) > 30 and {"deletion marked", "commit to be deleted", "commit deleted"} <= set(names)
    left = set()
    for k in range(1, len(names) + 1):
        store, _ = _retained_with(tmp_path, str(k), crash, k)
        assert_whole(store)
        assert _steps(store)[-1:] == [30] and read_catalogue(store).lost == []
        left.add(tuple(_steps(store)))
        again = LocalStore(tmp_path / str(k), disk=Unsynced())
        for _ in range(2):
            begin_epoch(again)
            retain(again, Policy(1))
        assert _steps(again) == [30] and len(_left(again)) == 1, names[k - 1]
        assert {each.step for each in marks_of(again)} == {30}
    assert left == {(10, 20, 30), (20, 30), (30,)}


def test_a_deletion_cut_short_is_decided_anew(store):
    made = _saves(store, 10, 20, verified=(10, 20))
    store.event = At(crash, "deletion marked")
    with pytest.raises(Crash):
        retain(store, Policy(1))
    store.event = silent
    assert standing(marks_on(store, made[0])).deleting and _steps(store) == [10, 20]
    mark(store, made[1], "quarantined", reason="a drill found damage")
    assert newest(store) == made[0]
    retain(store, Policy(1))
    assert _steps(store) == [10, 20] and not standing(marks_on(store, made[0])).deleting
    assert pin(store, made[0])


def test_pin_and_delete_at_once_one_sees_the_other(tmp_path):
    _, names = _retained_with(tmp_path, "count", crash, 0)
    outcomes = set()
    for k in range(1, len(names) + 1):
        said = []

        def pins(k=k, said=said):
            try:
                pin(LocalStore(tmp_path / f"p{k}", disk=Unsynced()), Committed(10, 1))
                said.append(True)
            except CheckpointError:
                said.append(False)

        store, _ = _retained_with(tmp_path, f"p{k}", pins, k)
        outcomes.add((said[0], 10 in _steps(store)))
        assert_whole(store)
    assert outcomes <= {(True, True), (False, False), (False, True)} and (True, True) in outcomes


def test_verify_and_mark(store):
    made = _saves(store, 10, 20)
    key = spoil(store, made[1])
    assert verify_and_mark(store, made[0]) == [] and standing(marks_on(store, made[0])).verified == "scrub"
    (damage,) = verify_and_mark(store, made[1])
    assert damage.certain and key in standing(marks_on(store, made[1])).quarantined
    assert newest(store) == made[0]
    store.delete(made[0].key)
    assert verify_and_mark(store, made[0]) == [], "deleted meanwhile, which is no damage"
    assert not standing(marks_on(store, made[0])).quarantined


def test_an_unreachable_store_is_no_damage(tmp_path, monkeypatch):
    store = LocalStore(tmp_path, disk=Unsynced())
    (made,) = _saves(store, 10)

    get_range = store.get_range

    def refuse(key, start, stop):
        if key.endswith(".bin"):
            raise StorageError("the server cannot be reached")
        return get_range(key, start, stop)

    monkeypatch.setattr(store, "get_range", refuse)
    damage = verify_and_mark(store, made)
    assert damage and not damage[0].certain and marks_of(store) == {}


def test_upkeep_verifies_and_retains_beside_the_run(tmp_path):
    store = LocalStore(tmp_path, disk=Unsynced())
    epoch = begin_epoch(store).number
    upkeep = Upkeep(store, Policy(1), epoch)
    made = [tiny_save(store, step, epoch) for step in (10, 20, 30)]
    spoil(store, made[2])
    for committed in made:
        upkeep.after(committed.key)
    upkeep.close(20.0)
    found = upkeep.finished()
    assert [each.committed for each in found] == made and not any(each.error for each in found)
    assert [each.retained.deleted for each in found] == [[], [made[0].key], []]
    assert found[2].damage and quarantined(store) == {made[2].key} and newest(store) == made[1]
    assert upkeep.finished() == []


def test_upkeep_ends_in_the_middle_of_a_scrub(tmp_path, monkeypatch):
    store = LocalStore(tmp_path, disk=Unsynced())
    (made,) = _saves(store, 10)
    reading = threading.Event()

    class Slow(upkeep_module.Throttle):
        def __call__(self, num_bytes):
            reading.set()
            assert self.stopped.wait(20)
            super().__call__(num_bytes)

    monkeypatch.setattr(upkeep_module, "Throttle", Slow)
    upkeep = Upkeep(store, Policy(1), 1)
    upkeep.after(made.key)
    assert reading.wait(20)
    upkeep.close(0.0)
    assert not upkeep.thread.is_alive() and marks_of(store) == {} and upkeep.finished() == []


class Life(RuleBasedStateMachine):
    """Saves, verification, pins, quarantine, restarts and retention in any order, with a crash or another process's
    act at any event of a retention. What must hold afterwards is computed from what stood before."""

    def __init__(self):
        super().__init__()
        self.store = ObjectStore("memory://")
        self.step = 0

    @initialize()
    def start(self):
        self.restart()

    def listed(self):
        return list_committed(self.store)

    def some(self, pick):
        listed = self.listed()
        return listed[pick % len(listed)]

    @rule()
    def restart(self):
        self.epoch = begin_epoch(self.store).number
        found = newest(self.store)
        self.restored = {found.key} if found else set()
        self.step = max(self.step, *(c.step for c in self.listed())) if self.listed() else self.step

    @rule()
    def save(self):
        self.step += 5
        tiny_save(self.store, self.step, self.epoch)

    @precondition(lambda self: self.listed())
    @rule(pick=st.integers(0, 7), what=st.sampled_from(["verify", "verify", "pin", "unpin", "quarantine", "release"]))
    def act(self, pick, what):
        self.do(what, self.some(pick))

    def do(self, what, committed):
        if what == "verify":
            verify_and_mark(self.store, committed)
        elif what == "pin":
            pin(self.store, committed)
        else:
            kind = {"unpin": "unpinned", "quarantine": "quarantined", "release": "released"}[what]
            mark(self.store, committed, kind, reason="a test")

    def good(self):
        standings = {c: standing(marks_on(self.store, c)) for c in self.listed()}
        return [c for c, s in standings.items() if s.is_verified and not s.quarantined]

    @rule(keep=st.integers(0, 3), every=st.sampled_from([0, 0, 10]), at=st.integers(0, 60))
    def retain(self, keep, every, at):
        before, good, held = self.listed(), self.good(), pinned(self.store) | self.restored
        held |= {c.key for c in before if keep == 0}
        last = newest(self.store)
        self.store.event = At(crash, at)
        ended = True
        try:
            retain(self.store, Policy(keep, every), self.restored, epoch=self.epoch)
        except Crash:
            ended = False
        self.store.event = silent
        after = self.listed()
        assert held & {c.key for c in before} <= {c.key for c in after}
        assert newest(self.store) == last
        assert len(self.good()) >= min(keep, len(good))
        assert good[len(good) - keep :] == self.good()[len(self.good()) - keep :] or keep > len(good)
        if ended:
            assert {key.rpartition("-")[0] for key in _left(self.store)} == {c.name for c in after}

    @precondition(lambda self: len(self.listed()) > 1)
    @rule(
        keep=st.integers(1, 2),
        at=st.integers(1, 60),
        pick=st.integers(0, 7),
        what=st.sampled_from(["pin", "quarantine", "unpin", "verify"]),
    )
    def retain_beside_another(self, keep, at, pick, what):
        """The other's act falls before or behind the last look of a deletion; what it then saw must have allowed it."""
        committed, before, held = self.some(pick), self.listed(), pinned(self.store) | self.restored
        rival, promised, allowed = ObjectStore("memory://"), set(), []
        rival.backend = self.store.backend

        def other():
            try:
                mine, self.store = self.store, rival
                self.do(what, committed)
                if what == "pin":
                    promised.add(committed.key)
            except CheckpointError:
                pass
            finally:
                self.store = mine

        hook = At(other, at)

        def look(name):
            if name == "commit to be deleted":
                mine, self.store = self.store, rival
                allowed.append(self.good())
                self.store = mine
            hook(name)

        self.store.event = look
        done = retain(self.store, Policy(keep), self.restored, epoch=self.epoch)
        self.store.event = silent
        kept = {c.key for c in self.listed()}
        if what == "unpin":
            held -= {committed.key}
        assert (held | promised) & {c.key for c in before} <= kept
        for key, good in zip(done.deleted, allowed, strict=True):
            assert sum(c > Committed.parse(key) for c in good) >= keep

    @invariant()
    def all_whole(self):
        assert_whole(self.store)
        assert read_catalogue(self.store).lost == []


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
