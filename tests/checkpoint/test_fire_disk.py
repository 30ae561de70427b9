"""Power cuts: after any call, and with any of what was not synced lost, torn or out of order, what `save` reported well
is there bit for bit, and nothing half."""

import random

import pytest

from tests.checkpoint.attempts import Forked, attempt, check, go_on
from tests.checkpoint.disks import PowerCut, Recorder
from tests.checkpoint.memory import MemoryStore, PowerOff
from tests.checkpoint.small import At
from truestep.storage.local import LocalStore

RUN = "new/run"


def try_power_cuts(calls, base, limit, seed=0, first=0, every=1, went_on=10):
    """Cut the power after each `every`-th call from `first` on, at most `limit` ways each; how many there were, and how
    many different disks they left. The store is at `base`/new/run, of which only `base` was there before.

    `calls` hold a note "ok" with the step of each save that was reported well, and "save" when one begins.
    """
    choice, seen, must, may, cuts = random.Random(seed), set(), set(), set(), 0
    disk = PowerCut(str(base), str(base / RUN))
    for number, call in enumerate(calls):
        if call.kind == "save":
            may.add(int(call.path))
        elif call.kind == "ok":
            must.add(int(call.path))
        else:
            disk.apply(call)
        if number < first or (number - first) % every:
            continue
        for objects in disk.leavings(limit, choice):
            cuts += 1
            fingerprint = (frozenset(must), hash(frozenset(objects.items())))
            if fingerprint not in seen:
                seen.add(fingerprint)
                steps = check(MemoryStore(objects), must, may)
                if len(seen) % went_on == 0:
                    go_on(MemoryStore(dict(objects)), steps, 9)
    return cuts, len(seen)


def recorded(base, attempts, disk=None):
    """The calls of attempts, each with the steps that it saves."""
    disk = disk or Recorder()
    for steps in attempts:
        store = LocalStore(base / RUN, disk=disk)
        for result in _saves(store, steps, disk):
            assert result.ok, result.error
    return disk.calls


def _saves(store, steps, disk):
    """An attempt that notes when its saves begin, and when they were reported well."""

    def event(name):
        if name == "staged":
            disk.note("save", waiting[0])

    waiting, results = list(steps), []
    store.event = event
    for step in steps:
        results += attempt(store, [step])[1]
        waiting.pop(0)
        if results[-1].ok:
            disk.note("ok", step)
    return results


def power_cuts(folder, limit=24, every=1):
    """Two attempts of one process."""
    return try_power_cuts(recorded(folder, [[1, 2], [3]]), folder, limit, every=every)


def test_power_cut_after_any_call(tmp_path):
    cuts, disks = power_cuts(tmp_path)
    print(f"{cuts} power cuts, {disks} different disks of one process")
    assert cuts > 300 and disks > 15  # few: hardly anything is ever unsafe


def killed_then_cut(folder, off_at, limit=12, every=5):
    """A process is killed before a call, another one goes on, then the power is cut."""
    folder.mkdir()
    disk = Recorder(off_at=off_at)
    try:
        recorded(folder, [[1], [2]], disk)
        return 0, 0  # there are fewer calls
    except PowerOff:
        first, disk.off_at = len(disk.calls), 0
    recorded(folder, [[3]], disk)
    return try_power_cuts(disk.calls, folder, limit, first=first, every=every)


def new_folders(folder):
    """The numbers of the calls that come right after a folder was made."""
    folder.mkdir()
    return [n + 2 for n, call in enumerate(recorded(folder, [[1], [2]])) if call.kind == "make folder"]


def test_power_cut_after_a_kill(tmp_path):
    """Names that a killed process left unsynced must not carry what the next one commits."""
    found = [killed_then_cut(tmp_path / str(k), k) for k in [*new_folders(tmp_path / "all"), 20, 29, 60]]
    assert all(cuts for cuts, _ in found)
    print(f"{sum(cuts for cuts, _ in found)} power cuts after a kill, {sum(disks for _, disks in found)} disks")


@pytest.mark.slow
def test_power_cut_after_any_call_in_many_ways(tmp_path):
    print(f"{power_cuts(tmp_path, limit=400)} power cuts and different disks of one process")


@pytest.mark.slow
def test_power_cut_after_a_kill_at_any_call(tmp_path):
    found = [killed_then_cut(tmp_path / str(k), k, limit=32, every=1) for k in range(1, 250)]
    kills = sum(cuts > 0 for cuts, _ in found)
    assert kills > 60 and not any(cuts for cuts, _ in found[kills:])
    print(f"{kills} kills, then {sum(cuts for cuts, _ in found)} power cuts, {sum(disks for _, disks in found)} disks")


def _several(folder, world, limit, every):
    calls = recorded(folder, [[1]])
    disks = [Recorder(rank + 1) for rank in range(world)]
    ranks = Forked(folder / RUN, [2], [At() for _ in disks], disks=disks)
    said = [ranks.said(rank) for rank in range(world)]
    ranks.end()
    assert all(saved.ok for (_, (saved,)), _, _ in said)
    merged = sorted((call for _, _, theirs in said for call in theirs), key=lambda call: call.at_ns)
    first, note = len(calls), Recorder()
    note.note("save", 2)
    return try_power_cuts([*calls, *note.calls, *merged], folder, limit, first=first, every=every)


@pytest.mark.parametrize("world", [2, 3])
def test_power_cut_while_several_ranks_write(tmp_path, world):
    print(f"{_several(tmp_path, world, 12, 3)} power cuts and different disks of {world} ranks")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_power_cut_while_several_ranks_write_in_many_ways(tmp_path, world):
    print(f"{_several(tmp_path, world, 400, 1)} power cuts and different disks of {world} ranks")
