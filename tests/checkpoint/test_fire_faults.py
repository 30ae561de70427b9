"""Disks and stores that fail, hang or answer late: no save that was reported well is lost, what failed is one sentence,
and later saves work."""

import contextlib
import errno
import signal

import pytest
import torch

from tests.checkpoint.attempts import BLOCK_BYTES, attempt, blank, check, cut, extra, go_on, same, state
from tests.checkpoint.disks import Faulty
from tests.checkpoint.memory import MemoryStore, PowerOff, Requests
from truestep.checkpoint.catalogue import Committed, begin_epoch, list_committed
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.load import load_newest
from truestep.errors import CheckpointError, StorageError
from truestep.storage.interface import Undurable
from truestep.storage.local import LocalStore

SAID = {
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "quota is used up",
    errno.EIO: "input/output error",
    errno.EROFS: "file system is read-only",
}


def _checkpointer(store, deadline_s=30.0):
    number = begin_epoch(store).number
    return Checkpointer(store, attempt=number, rank=0, world=1, kv=None, block_bytes=BLOCK_BYTES, deadline_s=deadline_s)


def _save(checkpointer, step, asynchronous=True):
    return checkpointer.save(step, cut(state(step), 0, 1), extra(step), asynchronous=asynchronous).result()


def _calls_of_a_save(folder):
    """The calls of the disk that a second save of an attempt makes, in order, and how many there were before it."""
    disk = Faulty()
    checkpointer = _checkpointer(LocalStore(folder, disk=disk))
    assert _save(checkpointer, 1).ok
    before = disk.count
    assert _save(checkpointer, 2).ok
    checkpointer.close()
    return disk.names[before:], before


def try_fault(folder, number, fault):
    """One call of the save of step 2 fails; step 3 must be well. Whether the save was reported well."""
    disk = Faulty({number: fault})
    store = LocalStore(folder, disk=disk)
    checkpointer = _checkpointer(store)
    assert _save(checkpointer, 1).ok
    saved = _save(checkpointer, 2)
    assert saved.ok or (str(folder) in saved.error and "\n" not in saved.error)
    if isinstance(fault, int) and not saved.ok:
        assert SAID[fault] in saved.error
    assert _save(checkpointer, 3).ok
    checkpointer.close()
    steps = check(LocalStore(folder), {1, 3, *([2] if saved.ok else [])}, may={2})
    go_on(LocalStore(folder), steps, 4)
    return saved.ok


def _faults(folder, choose):
    """Faults at the calls of a save: (fault, name of the call, whether the save was reported well)."""
    names, before = _calls_of_a_save(folder / "undisturbed")
    found = []
    for n, name in enumerate(names):
        faults = [*SAID, "short"] if name in ("write", "read") else [*SAID]
        for fault in choose(n, faults):
            well = try_fault(folder / f"{n}-{fault}", before + n + 1, fault)
            assert well == (fault == "short"), f"{fault} in call {n}, {name}"
            found.append((fault, name, well))
    return found


def test_a_failing_call(tmp_path):
    """Each call once, with one of the errors."""
    found = _faults(tmp_path, lambda n, faults: {faults[n % len(faults)], *faults[4:]})
    assert {name for _, name, _ in found} >= {"create", "write", "sync", "close", "link", "unlink", "sync folder"}
    print(f"{len(found)} faults of the disk in a save, {sum(well for _, _, well in found)} of them harmless")


@pytest.mark.slow
def test_a_failing_call_with_every_error(tmp_path):
    found = _faults(tmp_path, lambda n, faults: faults)
    print(f"{len(found)} faults of the disk in a save, {sum(well for _, _, well in found)} of them harmless")


def test_a_name_that_may_not_survive_is_no_success(tmp_path):
    """The folder of the commits cannot be synced after the commit was linked: it can be read, but the save failed."""
    store = LocalStore(tmp_path)
    checkpointer = _checkpointer(store)
    names = []

    class Unsynced(Faulty):
        def sync_folder(self, path):
            names.append(path.name)
            if path.name == "commits":
                raise OSError(errno.EIO, "x")

    store.disk = Unsynced()
    saved = _save(checkpointer, 1)
    assert not saved.ok and "a power cut may still take it away" in saved.error and "commits" in names
    assert list_committed(store) == [Committed(1, 1)]
    with pytest.raises(Undurable, match="input/output error"):
        store.put("commits/x", b"1")
    store.disk = Faulty()
    assert _save(checkpointer, 2).ok
    checkpointer.close()


def test_a_full_disk_for_a_while(tmp_path):
    """Every call fails from some time on, then none: nothing but the saves of that time is missing."""
    disk = Faulty()
    store = LocalStore(tmp_path, disk=disk)
    checkpointer = _checkpointer(store)
    assert _save(checkpointer, 1).ok
    disk.steady = (disk.count + 5, errno.ENOSPC)
    for step in (2, 3, 4):
        saved = _save(checkpointer, step)
        assert not saved.ok and "no space is left" in saved.error
    disk.steady = None
    assert _save(checkpointer, 5).ok
    checkpointer.close()
    assert check(store, {1, 5}) == {1, 5}


def test_reads_that_fail(tmp_path):
    """A read error is damage like any other: the older step, loudly; or one sentence."""
    for step in (1, 2):
        assert attempt(LocalStore(tmp_path), [step])[1][0].ok
    disk = Faulty()
    assert load_newest(LocalStore(tmp_path, disk=disk), blank()).step == 2
    outcomes = set()
    for number, name in enumerate(disk.names, 1):
        targets = blank()
        fault = "short" if name == "read" and number % 2 else errno.EIO
        try:
            loaded = load_newest(LocalStore(tmp_path, disk=Faulty({number: fault})), targets)
        except (CheckpointError, StorageError) as error:
            same(targets, 999)
            assert "input/output error" in str(error) and "\n" not in str(error)
            outcomes.add("refused")
        else:
            same(targets, loaded.step)
            assert loaded.step == 2 or "input/output error" in loaded.fell_back[0]
            outcomes.add(loaded.step)
    assert outcomes == {"refused", 1, 2}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_write_that_hangs_is_given_up_and_never_commits(tmp_path, asynchronous):
    """At the deadline, while the call still hangs; training and later saves go on, and what comes back late finds that
    its save is over, though all its calls succeed."""
    disk = Faulty()
    store = LocalStore(tmp_path, disk=disk)
    checkpointer = _checkpointer(store, deadline_s=0.4)
    disk.faults = {disk.count + 3: "stuck"}
    live = cut(state(1), 0, 1)
    save = checkpointer.save(1, live, extra(1), asynchronous=asynchronous)
    assert disk.stuck.wait(30)
    saved = save.result()
    assert not saved.ok and saved.error == "the store has not taken it within 0.4 s"
    assert saved.total_s < 5
    stuck, old_stage = checkpointer.thread, checkpointer.stage
    for name, piece in live.items():  # training goes on
        piece.local.copy_(cut(state(2), 0, 1)[name].local)
    checkpointer.group.deadline_s = 30.0
    assert _save(checkpointer, 2).ok
    assert checkpointer.stage is not old_stage, "a thread that hangs may still read its buffers"
    disk.freed.set()
    assert stuck is not None
    stuck.join(30)
    assert not stuck.is_alive()
    assert [result.step for result in checkpointer.finished()] == [1, 2]
    checkpointer.close()
    assert check(store, {2}) == {2}


def test_a_save_that_hangs_before_its_commit_never_commits(tmp_path):
    """The manifest is stored only after the deadline: the save was reported as failed, and stays so."""
    disk = Faulty()
    store = LocalStore(tmp_path, disk=disk)
    checkpointer = _checkpointer(store, deadline_s=0.4)
    store.event = lambda name: name == "objects checked" and disk.faults.update({disk.count + 2: "stuck"})
    save = checkpointer.save(1, cut(state(1), 0, 1), extra(1), asynchronous=True)
    assert disk.stuck.wait(30) and not save.result().ok
    disk.freed.set()
    checkpointer.thread.join(30)
    assert any(entry.key.endswith("manifest.json") for entry in store.list("steps"))
    assert check(store, set()) == set()


def test_a_commit_that_hangs_past_the_deadline(tmp_path):
    """The last call hangs: the save is reported as failed, yet what comes of it later is whole."""
    disk = Faulty()
    store = LocalStore(tmp_path, disk=disk)
    checkpointer = _checkpointer(store, deadline_s=0.4)
    checkpointer.store.event = lambda name: (
        name == "commit to be created" and disk.faults.update({disk.count + 1: "stuck"})
    )
    save = checkpointer.save(1, cut(state(1), 0, 1), extra(1), asynchronous=True)
    assert not save.result().ok
    disk.freed.set()
    checkpointer.thread.join(30)
    checkpointer.close()
    assert check(store, set(), may={1}) == {1}


def test_writes_that_signals_interrupt(tmp_path):
    """Timers and polite stops arrive while a save writes."""
    arrived = []
    before = signal.signal(signal.SIGALRM, lambda *_: arrived.append(1))
    store = LocalStore(tmp_path)
    checkpointer = _checkpointer(store)
    big = {"model.big": torch.arange(1 << 20)}
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        results = [checkpointer.save(step, big, {}, asynchronous=False).result() for step in range(1, 6)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    checkpointer.close()
    assert all(result.ok for result in results) and len(arrived) > 3
    target = {"model.big": torch.zeros(1 << 20, dtype=torch.int64)}
    assert load_newest(store, target).step == 5 and torch.equal(target["model.big"], big["model.big"])


# Object stores: what becomes of a request whose client is gone, or never hears the answer.


def _base():
    store = MemoryStore()
    assert attempt(store, [1])[1][0].ok
    return store.objects


def _changes():
    store = Requests(dict(_base()), lambda number, effect: effect())
    assert attempt(store, [2])[1][0].ok
    return len(store.changes)


def test_a_request_that_takes_effect_after_its_client_is_gone(monkeypatch):
    """The request in flight when an attempt is killed arrives at any moment of the next attempt, or never."""
    cases, count, later = 0, _changes(), _changes()
    for last in range(1, count + 1):
        for moment in range(1, later + 3):
            late = []

            def die(number, effect, late=late, last=last):
                if number == last:
                    late.append(effect)
                    raise PowerOff
                effect()

            def meddle(number, effect, late=late, moment=moment):
                if number == moment and late:
                    _arrive(late.pop())
                effect()

            objects = dict(_base())
            with pytest.raises(PowerOff):
                attempt(Requests(objects, die), [2])
            resumed, (saved,) = attempt(Requests(objects, meddle), [3])
            assert resumed in (1, 2) and saved.ok
            check(MemoryStore(objects), {1, 3}, may={2})
            cases += 1
    print(f"{cases} cases of a request that arrives late")
    assert cases >= 35


def _arrive(effect):
    with contextlib.suppress(StorageError):  # the store refuses it, and nobody hears
        effect()


@pytest.mark.parametrize("took_effect", [True, False])
def test_an_answer_that_is_lost(took_effect):
    """Of any request: the save is reported well and is there, or failed; the attempt goes on."""
    well = 0
    for lost in range(1, _changes() + 1):

        def meddle(number, effect, lost=lost):
            if number != lost or took_effect:
                effect()
            if number == lost:
                raise StorageError("the connection was reset")

        objects = dict(_base())
        store = Requests(objects, meddle)
        try:
            _, (saved, later) = attempt(store, [2, 3])
        except StorageError as error:  # the attempt could not begin
            assert str(error) == "the connection was reset" and len(store.changes) <= 2
            continue
        assert later.ok and (saved.ok or saved.error == "the connection was reset")
        well += saved.ok
        check(MemoryStore(objects), {1, 3, *([2] if saved.ok else [])})
    assert well >= (3 if took_effect else 0)


class Stale(MemoryStore):
    """Some of its lists, by number from 1, show what was there before."""

    def __init__(self, objects, before, stale):
        super().__init__(objects)
        self.before, self.stale, self.lists = before, stale, 0

    def list(self, prefix=""):
        self.lists += 1
        return MemoryStore(self.before).list(prefix) if self.lists in self.stale else super().list(prefix)


@pytest.mark.parametrize("stale", [{1}, {2}, {1, 2}, {3}, {3, 4, 5}, {4}, {5, 6}, {3, 5, 7, 9}, range(1000)])
def test_a_store_that_lists_what_was_there_before(monkeypatch, stale):
    """An attempt that begins while the newest commit is not listed yet waits for it, and gives up with a sentence."""
    monkeypatch.setattr("truestep.checkpoint.catalogue.LATE_LISTS_S", (0.0,) * 4)
    before = _base()
    objects = dict(before)
    assert attempt(MemoryStore(objects), [2])[1][0].ok
    store = Stale(objects, before, stale)
    if len(stale) == 1000:
        with pytest.raises(StorageError, match=r"lists what was there before commits/fence-000002 was stored; use ano"):
            attempt(store, [3])
        check(MemoryStore(objects), {1, 2})
    else:
        resumed, (saved,) = attempt(store, [3])
        assert resumed == 2 and saved.ok
        check(MemoryStore(objects), {1, 2, 3})


def test_a_commit_that_the_store_does_not_list_is_no_success(monkeypatch):
    monkeypatch.setattr("truestep.checkpoint.catalogue.LATE_LISTS_S", (0.0,) * 4)
    objects = dict(_base())
    checkpointer = _checkpointer(MemoryStore(objects))
    checkpointer.store = Stale(objects, dict(objects), range(1000))
    saved = _save(checkpointer, 2)
    checkpointer.close()
    assert (not saved.ok and "is not there" in saved.error) or "lists what was there before" in saved.error
