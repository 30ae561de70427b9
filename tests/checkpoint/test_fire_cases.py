"""Cases of the collection again, while the disk is slow and processes die."""

import contextlib
import signal
import threading

import pytest
import torch

from tests.checkpoint.attempts import BLOCK_BYTES, Forked, attempt, blank, check, same, strike
from tests.checkpoint.common import assert_same, one
from tests.checkpoint.memory import MemoryStore
from tests.checkpoint.small import At
from truestep.checkpoint.catalogue import Committed, list_committed, newest
from truestep.checkpoint.load import Mismatch, load, load_newest
from truestep.storage.disk import Disk
from truestep.storage.local import LocalStore


class Slow(Disk):
    """Every write waits for a token, of which the test gives one at a time."""

    def __init__(self):
        self.tokens, self.asked = threading.Semaphore(0), threading.Semaphore(0)
        self.free = False

    def write(self, handle, data):
        if not self.free:
            self.asked.release()
            assert self.tokens.acquire(timeout=60)
        return super().write(handle, data)


def test_c37_training_goes_on_while_a_slow_disk_writes(tmp_path):
    """Between any two writes of a save the weights, the optimizer's state, tensors that share storage and plain values
    change; what is on the disk is what was there at the call, for each of three saves in a row."""
    disk = Slow()
    store = LocalStore(tmp_path)
    checkpointer = one(store, block_bytes=BLOCK_BYTES)
    store.disk = disk
    buffer = torch.zeros(6)
    live = {"model.w": torch.zeros(400_000), "optim.m": torch.zeros(5), "low": buffer[:4], "high": buffer[2:]}
    plain, wanted = {"step": 0, "loader": {"next_row": 0}}, {}

    def train(value):
        live["model.w"].fill_(value)
        live["optim.m"].fill_(-value)
        buffer.fill_(2 * value)
        plain["step"], plain["loader"]["next_row"] = value, 10 * value

    for step in (1, 2, 3):
        train(step)
        wanted[step] = (
            {name: x.clone() for name, x in live.items()},
            {"step": step, "loader": {"next_row": 10 * step}},
        )
        save = checkpointer.save(step, live, plain, asynchronous=True)
        writes = 0
        while not save.pending.future.done():
            train(100 + writes)
            if disk.asked.acquire(timeout=0.02):
                writes += 1
                disk.tokens.release()
        assert save.result().ok and writes >= 4
    checkpointer.close()
    for committed in list_committed(store):
        target = {
            "model.w": torch.empty(400_000),
            "optim.m": torch.empty(5),
            "low": torch.empty(4),
            "high": torch.empty(4),
        }
        assert load(store, committed, target).extra == wanted[committed.step][1]
        assert_same(target, wanted[committed.step][0])


TIED = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def _save_tied(store, step, factor):
    tied = factor * TIED
    checkpointer = one(store)
    saved = checkpointer.save(step, {"embed": tied, "head": tied}, {}, asynchronous=False).result()
    checkpointer.close()
    return saved


@pytest.mark.parametrize("k", range(3, 60, 8))
def test_c41_tied_tensors_of_a_save_that_is_cut_off(tmp_path, k):
    """Whatever is left, both names hold the values of one step and are one tensor."""
    store = MemoryStore()
    assert _save_tied(store, 1, 1.0).ok

    def stop():
        raise KeyboardInterrupt

    store.event = At(stop, k)
    with contextlib.suppress(KeyboardInterrupt):
        _save_tied(store, 2, 2.0)
    store.event = lambda name: None
    weight = torch.zeros(3, 2)
    loaded = load_newest(store, {"embed": weight, "head": weight})
    assert torch.equal(weight, loaded.step * TIED)
    apart = {"embed": torch.zeros(3, 2), "head": torch.zeros(3, 2)}
    with pytest.raises(Mismatch, match="one tensor in the checkpoint, but two here"):
        load_newest(store, apart)
    assert not apart["embed"].any() and not apart["head"].any()


def test_c48_steps_and_attempts_are_numbers(tmp_path):
    """Many attempts, steps of one to seven digits, some saved twice, kills in between: always the newest by number."""
    store = LocalStore(tmp_path / "run")
    done = set()
    for number, step in enumerate([9, 10, 99, 100, 1000, 1001, 99_999, 100_000, 1_000_000, 1_000_001], 1):
        if number % 3 == 0:  # one that dies before its commit
            ranks = Forked(store.root, [step + 1], [At(strike(signal.SIGKILL), 30)])
            assert ranks.wait(0) == -signal.SIGKILL
            ranks.end()
        resumed, (saved,) = attempt(store, [step])
        assert saved.ok and resumed == max(done, default=None)
        done.add(step)
        assert newest(store).step == step
    check(store, done)
    _, (again,) = attempt(store, [100])  # the same step of a later attempt counts more than that of the earlier
    assert again.ok
    both = [committed for committed in list_committed(store) if committed.step == 100]
    assert len(both) == 2 and both == sorted(both, key=lambda committed: committed.epoch)
    assert newest(store).step == 1_000_001


def test_c48_pointers_and_half_steps_are_not_looked_at(tmp_path):
    """What other programs and dead attempts leave beside the commits: newer by name, by text and by time."""
    store = LocalStore(tmp_path)
    assert attempt(store, [900])[1][0].ok and attempt(store, [1000])[1][0].ok
    for key in ("commits/latest", "commits/step_2000", "commits/000000001100-000002.tmp", "commits/1200", "latest"):
        store.put(key, b"step_800")
    (tmp_path / "steps" / "000000001300-000002-0001").mkdir()
    (tmp_path / "commits" / ".tmp-1400").write_bytes(b"half a commit")
    assert newest(store) == Committed(1000, 2)
    targets = blank()
    loaded = load_newest(store, targets)
    assert loaded.step == 1000 and loaded.fell_back == []
    same(targets, 1000)
    assert attempt(store, [1100])[0] == 1000


def test_c40_a_load_that_is_killed_changes_nothing_on_disk(tmp_path):
    """At any event of a load; the next one finds what was there."""
    store = LocalStore(tmp_path / "run")
    assert attempt(store, [1])[1][0].ok
    counted = At()
    load_newest(LocalStore(store.root, counted), blank())
    before = {entry.key: store.get(entry.key) for entry in store.list()}
    for k in range(1, len(counted.names) + 1):

        def stop():
            raise KeyboardInterrupt

        targets = blank()
        with pytest.raises(KeyboardInterrupt):
            load_newest(LocalStore(store.root, At(stop, k)), targets)
        if counted.names[k - 1].endswith(("read", "blocks verified")):
            same(targets, 999)
    assert {entry.key: store.get(entry.key) for entry in store.list()} == before
    check(store, {1})
