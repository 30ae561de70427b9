"""A process is stopped in the middle of a save, another attempt takes over, then the first one goes on: what it does
later counts for nothing, and it ends with one sentence."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import uuid

import pytest

from tests.checkpoint.attempts import Forked, attempt, check, commits_of, strike
from tests.checkpoint.small import At
from truestep.checkpoint.catalogue import Committed, begin_epoch, list_committed
from truestep.storage.local import LocalStore
from truestep.storage.objects import ObjectStore

ZOMBIE = Committed(2, 2)


def _committed_once(folder):
    assert attempt(LocalStore(folder), [1])[1][0].ok
    return folder


def _undisturbed(folder):
    ranks = Forked(_committed_once(folder), [2], [At()])
    (_, (saved,)), names, _ = ranks.said(0)
    ranks.end()
    assert saved.ok
    return names


def try_zombie(folder, k):
    """The second attempt is stopped at its k-th event, the third one saves step 3, then the second goes on. What the
    second said, and whether its step 2 counts."""
    zombie = Forked(_committed_once(folder), [2], [At(strike(signal.SIGSTOP), k)])
    _, status = os.waitpid(zombie.pids[0], os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    store = LocalStore(folder)
    resumed, (saved,) = attempt(store, [3])
    assert saved.ok, saved.error
    honoured = set(list_committed(store))
    os.kill(zombie.pids[0], signal.SIGCONT)
    said, _, _ = zombie.said(0)
    zombie.end()
    assert set(list_committed(store)) == honoured, "what a zombie does later changes nothing"
    assert check(store, {1, 3}, may={2}) == {1, resumed, 3}
    return said, resumed == 2


def _zombies(folder, every):
    """Stop it at every so many events, and around the commit."""
    names = _undisturbed(folder / "undisturbed")
    fenced, commit = names.index("fence created") + 1, commits_of(names, ZOMBIE)
    stops = {*range(fenced, len(names) + 1, every), *range(commit - 2, commit + 4), len(names)}
    for k in sorted(stops):
        said, counts = try_zombie(folder / str(k), k)
        assert not isinstance(said, str), f"stopped after {names[k - 1]}: {said}"
        resumed, (saved,) = said
        assert counts == (k >= commit), names[k - 1]
        assert resumed in (1, 3)  # it may look for the newest only after it goes on
        if not counts:
            assert not saved.ok and saved.superseded and "\n" not in saved.error
            assert "epoch 2 was superseded by 3; this attempt must stop" in saved.error
        elif not saved.ok:
            raise AssertionError(f"stopped after {names[k - 1]}: its step counts, but it was told {saved.error}")
    return len(stops)


def test_a_stopped_process_goes_on_after_another_attempt(tmp_path):
    print(f"{_zombies(tmp_path, 7)} zombies")


@pytest.mark.slow
def test_a_process_stopped_at_any_event_goes_on_after_another_attempt(tmp_path):
    print(f"{_zombies(tmp_path, 1)} zombies")


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_is_stopped(tmp_path, victim):
    """The other one waits, and both are told, when they look, that their attempt is over."""
    _committed_once(tmp_path / "run")
    events = [At(), At()]
    events[victim] = At(strike(signal.SIGSTOP), 12 if victim else 30)
    zombies = Forked(tmp_path / "run", [2], events)
    _, status = os.waitpid(zombies.pids[victim], os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    store = LocalStore(tmp_path / "run")
    assert attempt(store, [3])[1][0].ok
    os.kill(zombies.pids[victim], signal.SIGCONT)
    said = [zombies.said(rank)[0] for rank in range(2)]
    zombies.end()
    for _, (saved,) in said:
        assert not saved.ok and saved.superseded and "epoch 2 was superseded by 3" in saved.error
    check(store, {1, 3})


def _begin_many(folder, count, barrier):
    """Attempts that begin at the same time, each in a thread with a store of its own."""
    found = []

    def begin():
        store = LocalStore(folder)
        barrier.wait(30)
        found.append(begin_epoch(store))

    threads = [threading.Thread(target=begin) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_attempts_that_begin_at_the_same_time(tmp_path):
    """Each has a number of its own and honours the same; only the last may commit."""
    store = LocalStore(_committed_once(tmp_path / "run"))
    for _ in range(5):
        before = list_committed(store)
        epochs = _begin_many(store.root, 4, threading.Barrier(4))
        assert len({epoch.number for epoch in epochs}) == 4
        assert {epoch.honours for epoch in epochs} == {tuple(each.key for each in before)}
    check(store, {1})


SCRIPT = """
import os, pickle, signal, sys
from tests.checkpoint.attempts import attempt, strike
from tests.checkpoint.small import At
from truestep.storage.objects import ObjectStore
url, options, stops = pickle.loads(bytes.fromhex(sys.argv[1]))
for k in stops:
    store = ObjectStore(f"{url}/{k}", options, At(strike(signal.SIGSTOP), k))
    _, (saved,) = attempt(store, [2])
    print(saved.ok, saved.superseded, saved.error, flush=True)
"""


def _s3_events(seaweed, url):
    store = ObjectStore(f"{url}/undisturbed", seaweed.options)
    assert attempt(store, [1])[1][0].ok
    store.event = names = At()
    assert attempt(store, [2])[1][0].ok
    return names.names


@pytest.mark.s3
def test_a_stopped_process_on_s3(seaweed):
    """A new interpreter, since the client's threads do not survive a fork."""
    url = f"{seaweed.url}/{uuid.uuid4().hex}"
    names = _s3_events(seaweed, url)
    commit = names.index(f"{ZOMBIE.key}: created") + 1
    fenced = names.index("fence created") + 1
    stops = [fenced, names.index("staged") + 1, commit - 3, commit - 2, commit - 1, commit, commit + 1, commit + 2]
    for k in stops:
        assert attempt(ObjectStore(f"{url}/{k}", seaweed.options), [1])[1][0].ok
    argument = pickle.dumps((url, seaweed.options, stops)).hex()
    zombie = subprocess.Popen([sys.executable, "-c", SCRIPT, argument], stdout=subprocess.PIPE, text=True)
    assert zombie.stdout is not None
    try:
        for k in stops:
            _, status = os.waitpid(zombie.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            store = ObjectStore(f"{url}/{k}", seaweed.options)
            resumed, (saved,) = attempt(store, [3])
            assert saved.ok and (resumed == 2) == (k >= commit), names[k - 1]
            os.kill(zombie.pid, signal.SIGCONT)
            said = zombie.stdout.readline()
            check(store, {1, resumed, 3})
            if k < commit:
                assert said.startswith("False True ") and "epoch 2 was superseded by 3; this attempt must stop" in said
            else:
                assert said.startswith("True False")
    finally:
        zombie.kill()
        zombie.wait()
