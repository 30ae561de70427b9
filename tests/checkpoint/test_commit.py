"""The commit protocol: a failure at any event leaves exactly the committed checkpoints, and only live attempts commit.

Processes that are killed: test_fire_crash.py. Power cuts: test_fire_disk.py.
"""

import pytest
import torch

from tests.checkpoint.attempts import commits_of
from tests.checkpoint.common import assert_same, full_state, one, save_one
from tests.checkpoint.small import At, Crash, crash
from truestep.checkpoint.catalogue import Catalogue, Committed, begin_epoch, list_committed, newest, read_catalogue
from truestep.checkpoint.load import load, load_newest
from truestep.checkpoint.verify import verify
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import silent
from truestep.storage.local import LocalStore
from truestep.storage.objects import ObjectStore


def _assert_loadable_is_committed(store, states):
    """Every commit loads bitwise, the newest is taken, and the old one is always among them."""
    committed = list_committed(store)
    assert Committed(1, 1) in committed
    for each in committed:
        assert verify(store, each) == []
        target = full_state(99)
        assert load(store, each, target).extra == {"step": each.step}
        assert_same(target, states[each.step])
    target = full_state(99)
    loaded = load_newest(store, target)
    assert loaded.step == committed[-1].step
    assert all("without a commit" in note for note in loaded.fell_back)
    assert_same(target, states[loaded.step])
    return {each.step for each in committed}


def _second_attempt(store):
    """Begin an epoch and save step 2; what a restart of a run does."""
    checkpointer = one(store)
    result = checkpointer.save(2, full_state(2), {"step": 2}, asynchronous=True).result()
    checkpointer.close()
    return result


def _events_of_second_attempt(folder):
    store = LocalStore(folder)
    assert save_one(store, 1, full_state(1)).ok
    store.event = counter = At()
    assert _second_attempt(store).ok
    return counter.names


def test_c38_one_process_raises_at_sampled_events(tmp_path):
    states = {1: full_state(1), 2: full_state(2)}
    names = _events_of_second_attempt(tmp_path / "count")
    assert len(names) >= 20 and len({name.split(":")[-1] for name in names}) >= 12
    outcomes = []
    commit = commits_of(names, Committed(2, 2))
    for k in sorted({*range(1, len(names), 4), commit - 1, commit, commit + 1, len(names)}):
        store = LocalStore(tmp_path / str(k))
        assert save_one(store, 1, states[1]).ok
        store.event = At(crash, k)
        try:
            ok = _second_attempt(store).ok
        except Crash:
            ok = False  # before the save began
        store.event = silent
        steps = _assert_loadable_is_committed(store, states)
        assert not ok or 2 in steps
        outcomes.append(2 in steps)
    assert outcomes == sorted(outcomes), "the commit is one point in the order of events"
    assert not outcomes[0] and outcomes[-1]


def test_c48_which_is_the_newest(tmp_path):
    store = LocalStore(tmp_path)
    checkpointer = one(store)
    for step in (900, 1000):
        assert checkpointer.save(step, {"w": torch.tensor([float(step)])}, {}, asynchronous=False).result().ok
    for step in (1100, 1200):  # data and manifest are there, the commit is not
        store.event = lambda name: crash() if name == "commit to be created" else None
        assert not checkpointer.save(step, {"w": torch.tensor([float(step)])}, {}, asynchronous=False).result().ok
    checkpointer.close()
    (tmp_path / "commits" / "latest").write_text("step_800")  # a stray pointer means nothing
    target = {"w": torch.zeros(1)}
    assert newest(store) == Committed(1000, 1)
    assert load_newest(store, target).step == 1000 and target["w"].item() == 1000.0


def test_c48_listed_but_gone(tmp_path, caplog):
    """The newest epoch names a commit that was deleted: the one before, with a loud note; none at all raises."""
    store = LocalStore(tmp_path)
    assert save_one(store, 900, {"w": torch.tensor([900.0])}).ok
    assert save_one(store, 1000, {"w": torch.tensor([1000.0])}).ok
    begin_epoch(store)
    store.delete(Committed(1000, 2).key)
    target = {"w": torch.zeros(1)}
    loaded = load_newest(store, target)
    assert loaded.step == 900 and target["w"].item() == 900.0
    assert loaded.fell_back == ["the checkpoint of step 1000, epoch 2, is listed but gone"]
    assert "step 1000" in caplog.text
    store.delete(Committed(900, 1).key)
    with pytest.raises(CheckpointError, match=r"no checkpoint can be loaded: .*step 900, epoch 1, is listed but gone"):
        load_newest(store, target)


def test_c48_empty_store(tmp_path):
    """None, so that the caller can start and say so, or refuse."""
    store = LocalStore(tmp_path / "nothing")
    assert newest(store) is None and load_newest(store, {"w": torch.zeros(1)}) is None
    assert not (tmp_path / "nothing").exists()


def test_a_superseded_attempt_commits_nothing(tmp_path):
    store = LocalStore(tmp_path)
    zombie = one(store)
    assert zombie.save(1, {"w": torch.ones(1)}, {}, asynchronous=False).result().ok
    live = one(store)
    late = zombie.save(2, {"w": torch.zeros(1)}, {}, asynchronous=False).result()
    assert not late.ok and "epoch 1 was superseded by 2" in late.error
    assert live.save(3, {"w": torch.ones(1)}, {}, asynchronous=False).result().ok
    assert list_committed(store) == [Committed(1, 1), Committed(3, 2)]
    assert Committed(2, 1).key not in {entry.key for entry in store.list("commits")}, "it looked before it wrote"
    zombie.close()
    live.close()


def test_a_commit_that_slipped_through_is_void(tmp_path):
    """The zombie pauses between looking at the epochs and committing; the new attempt does not name what comes late."""
    store = LocalStore(tmp_path)
    zombie = one(store)
    assert zombie.save(1, {"w": torch.ones(1)}, {}, asynchronous=False).result().ok
    other = LocalStore(tmp_path)
    store.event = lambda name: begin_epoch(other) and None if name == "commit to be created" else None
    late = zombie.save(2, {"w": torch.zeros(1)}, {}, asynchronous=False).result()
    assert not late.ok and "epoch 1 was superseded by 2" in late.error
    assert "commits/000000000002-000001" in {entry.key for entry in store.list()}
    assert list_committed(store) == [Committed(1, 1)]
    zombie.close()


def test_quarantine_is_passed_over_and_forgotten_by_the_next_epoch(tmp_path):
    store = LocalStore(tmp_path)
    for step in (1, 2):
        assert save_one(store, step, {"w": torch.ones(1)}).ok
    bad = Committed(2, 2).key
    assert newest(store, quarantine=[bad]) == Committed(1, 1)
    loaded = load_newest(store, {"w": torch.zeros(1)}, quarantine=[bad])
    assert loaded.step == 1 and loaded.fell_back == [f"passed over {bad}: it is quarantined"]
    begin_epoch(store, quarantine=[bad])
    assert list_committed(store) == [Committed(1, 1)]


@pytest.mark.parametrize("moment", ["fence to be created", "epoch to be created", "epoch created"])
def test_two_attempts_that_begin_at_once(tmp_path, moment):
    """Each gets a number of its own, and the higher one is the one that counts, in whatever order they go on."""
    store, rival = LocalStore(tmp_path), LocalStore(tmp_path)
    assert save_one(store, 1, full_state(1)).ok
    events, numbers = [], []

    def event(name):
        events.append(name)
        if name == moment and events.count(name) == 1:
            numbers.append(begin_epoch(rival).number)

    store.event = event
    numbers.append(begin_epoch(store).number)
    assert sorted(numbers) == [2, 3] and numbers[0] == (2 if moment == "fence to be created" else 3)
    assert read_catalogue(store) == Catalogue([Committed(1, 1)], [], 3)


def test_a_commit_between_the_look_and_the_epoch_is_not_lost(tmp_path):
    """The old attempt is told that its save is well while the new one begins: so the new one honours it."""
    store, other = LocalStore(tmp_path), LocalStore(tmp_path)
    old = one(store)
    results = []

    def event(name):
        if name in ("fence to be created", "fence created", "epoch to be created", "epoch created"):
            step = len(results) + 1
            results.append(old.save(step, {"w": torch.ones(1)}, {}, asynchronous=False).result())

    other.event = event
    begin_epoch(other)
    old.close()
    assert [result.ok for result in results] == [True, False, False, False]
    assert all("epoch 1 was superseded by 2" in result.error for result in results[1:])
    assert list_committed(store) == [Committed(1, 1)]


def test_an_attempt_that_died_before_it_said_what_it_honours_changes_nothing(tmp_path):
    store, dead = LocalStore(tmp_path), LocalStore(tmp_path)
    assert save_one(store, 1, full_state(1)).ok
    dead.event = lambda name: crash() if name == "epoch to be created" else None
    with pytest.raises(Crash):
        begin_epoch(dead)
    assert read_catalogue(store) == Catalogue([Committed(1, 1)], [], 1)
    assert begin_epoch(store).number == 3
    assert list_committed(store) == [Committed(1, 1)]


class _LostAnswer(ObjectStore):
    """Creates the commit, then fails as if the answer had been lost."""

    def create(self, key, data):
        super().create(key, data)
        if key.startswith("commits/"):
            raise StorageError("the connection was reset")


def test_lost_answer_to_a_successful_commit(tmp_path):
    store = _LostAnswer("memory://")
    assert save_one(store, 1, {"w": torch.ones(1)}).ok
    assert list_committed(store) == [Committed(1, 1)]
