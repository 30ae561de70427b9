"""Crash matrix: a rank is killed at every event of an attempt; what is left is exactly what was committed."""

import signal

import pytest

from tests.checkpoint.attempts import Forked, attempt, check, commits_of, go_on, strike
from tests.checkpoint.small import At
from truestep.checkpoint.catalogue import Committed
from truestep.storage.local import LocalStore

GRACE_S = 0.03
SECOND = Committed(2, 2)


def _committed_once(folder):
    """A run with a committed step 1."""
    _, (saved,) = attempt(LocalStore(folder), [1])
    assert saved.ok
    return folder


def _events(folder, world):
    """The events of every rank of an attempt that nobody disturbs."""
    ranks = Forked(_committed_once(folder), [2], [At() for _ in range(world)])
    said = [ranks.said(rank) for rank in range(world)]
    ranks.end()
    for ended, _, _ in said:
        assert not isinstance(ended, str), ended
        resumed, (saved,) = ended
        assert resumed == 1 and saved.ok, saved.error
    return [names for _, names, _ in said]


def _killed(folder, world, victim, k):
    """The steps that are there after `victim` was killed at its k-th event. All survivors go on for a moment."""
    events = [At(strike(signal.SIGKILL), k) if rank == victim else At() for rank in range(world)]
    ranks = Forked(_committed_once(folder), [2], events)
    assert ranks.wait(victim) == -signal.SIGKILL
    told = [ended[0] for ended in ranks.end(GRACE_S) if ended is not None]
    well = any(not isinstance(each, str) and each[1][0].ok for each in told)
    store = LocalStore(folder)
    steps = check(store, {1, 2} if well else {1}, may={2})
    go_on(store, steps, 3)
    return steps


def _matrix(folder, world, every):
    """Kill each rank at each `every`-th event, and around the commit; returns how many cases there were."""
    baseline = _events(folder / "undisturbed", world)
    commit, cases = commits_of(baseline[0], SECOND), 0
    for victim, names in enumerate(baseline):
        around = {commit - 1, commit, commit + 1} if victim == 0 else set()
        for k in sorted({*range(min(1 + victim, every), len(names) + 1, every), len(names), *around}):
            steps = _killed(folder / f"{victim}-{k}", world, victim, k)
            if victim == 0:
                assert (2 in steps) == (k >= commit), f"{steps} after event {k}, {names[k - 1]}"
            cases += 1
    return cases, baseline


def _say(world, cases, baseline):
    print(f"crash matrix: {world} ranks, {[len(names) for names in baseline]} events, {cases} kills")


@pytest.mark.parametrize(("world", "every"), [(1, 8), (2, 13), (3, 25)])
def test_c38_killed_at_sampled_events(tmp_path, world, every):
    cases, baseline = _matrix(tmp_path, world, every)
    assert cases >= 10 and len({name.split(": ")[-1] for name in baseline[0]}) >= 25
    _say(world, cases, baseline)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_c38_killed_at_every_event(tmp_path, world):
    cases, baseline = _matrix(tmp_path, world, every=1)
    assert cases == sum(len(names) for names in baseline)
    _say(world, cases, baseline)
