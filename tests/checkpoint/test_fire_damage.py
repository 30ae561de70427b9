"""Corruption sweep: every file of a store damaged in every way; nothing is ever loaded that is wrong or silently older.

Each damage is refused in one sentence that names the file, or an older step is loaded with a note that names it, bit
for bit, or what was asked for comes back bit for bit, which is allowed where a byte serves nothing.
"""

import random
import re
from collections import Counter

import pytest

from tests.checkpoint.attempts import attempt, blank, go_on, same
from tests.checkpoint.memory import MemoryStore
from truestep.checkpoint.catalogue import Committed
from truestep.checkpoint.load import load, load_newest
from truestep.checkpoint.verify import verify
from truestep.errors import CheckpointError, StorageError

STEPS = (1, 2, 3)
PAGE = 512
UNREAD = re.compile(r"probe/.*|commits/fence-.*|epochs/00000[12]")
"""What a load does not look into: of fences the names, of epochs the newest."""


def three_steps():
    """The objects of three steps, each of an attempt of its own."""
    store = MemoryStore()
    for step in STEPS:
        _, (saved,) = attempt(store, [step])
        assert saved.ok
    return store.objects


@pytest.fixture(scope="module")
def good():
    return three_steps()


def _refusal(error, keys):
    assert "\n" not in str(error) and any(key in str(error) for key in keys), error
    return "refused"


def try_load(objects, keys):
    """Load the newest from a store in which `keys` were tampered with, then the steps that they belong to. How the
    first load ended."""
    store, targets = MemoryStore(objects), blank()
    try:
        loaded = load_newest(store, targets)
    except (CheckpointError, StorageError) as error:
        same(targets, 999)
        outcome = _refusal(error, keys)
    else:
        assert loaded is not None
        same(targets, loaded.step)
        outcome = "right" if loaded.step == max(STEPS) else "fell back"
        if outcome == "fell back":
            assert any(key in note or _about(key, note) for key in keys for note in loaded.fell_back), loaded.fell_back
    for step in (step for step in STEPS if any(_serves(key, step) for key in keys)):
        targets = blank()
        try:
            load(store, Committed(step, step), targets)
        except (CheckpointError, StorageError) as error:
            same(targets, 999)
            _refusal(error, keys)
            assert verify(store, Committed(step, step)), f"{keys}: a scrub finds nothing"
        else:
            same(targets, step)
            assert all(UNREAD.fullmatch(key) for key in keys if _serves(key, step)), f"{keys} loaded"
    return outcome


def _about(key, note):
    """Whether a note about a commit that is gone means this key."""
    match = re.fullmatch(r"commits/0*(\d+)-0*(\d+)", key)
    return match is not None and f"step {match[1]}, epoch {match[2]}" in note


def _serves(key, step):
    return re.match(rf"(commits|steps)/0*{step}-", key) is not None


def _needed(key):
    """Whether the newest step cannot be loaded without this file."""
    return key == "epochs/000003" or _serves(key, 3)


def _bits(objects, key, choice, count):
    """Flips: of every bit if they are few, else in every `n`-th byte one."""
    data, every = objects[key], max(1, len(objects[key]) * 8 // count)
    for bit in range(choice.randrange(every), len(data) * 8, every):
        at = bit // 8
        yield key, data[:at] + bytes([data[at] ^ 1 << choice.randrange(8)]) + data[at + 1 :]


def _cuts(objects, key, choice, count):
    data = objects[key]
    for length in {0, len(data) - 1, *(choice.randrange(len(data)) for _ in range(count))}:
        yield key, data[:length]


def _zeros(objects, key, choice, count):
    data = objects[key]
    for _ in range(count):
        start = choice.randrange(0, len(data), PAGE) if choice.random() < 0.5 else choice.randrange(len(data))
        stop = min(len(data), start + choice.choice([1, 16, PAGE]))
        yield key, data[:start] + bytes(stop - start) + data[stop:]


def _longer(objects, key, choice, count):
    for _ in range(count):
        yield key, objects[key] + choice.choice([b"\0", b"\n", b"junk", objects[key], bytes(PAGE)])


def _others(objects, key, choice, count):
    """Another file in its place: of the same kind all, of other kinds some."""
    kind = key.rsplit("/", 1)[-1] if key.startswith("steps/") else key.split("/")[0]
    alike = [other for other in objects if other != key and kind in (other.rsplit("/", 1)[-1], other.split("/")[0])]
    for other in {*alike, *choice.sample(sorted(objects), count)} - {key}:
        yield key, objects[other]


WAYS = {"flipped": _bits, "cut": _cuts, "zeroed": _zeros, "longer": _longer, "another's": _others}


def sweep(good, most):
    """All damages; how many of each way ended how. What may load though damaged is only what serves nothing."""
    choice, ended = random.Random(most), Counter()
    for key in sorted(good):
        scale = 1 if UNREAD.fullmatch(key) else most
        counts = {"flipped": 30 * scale, "cut": 3 * scale, "zeroed": 4 * scale, "longer": scale, "another's": 2}
        for way, count in counts.items():
            for _, data in WAYS[way](good, key, choice, min(count, len(good[key]) * 8)):
                if data != good[key] and not (way == "longer" and key.endswith(".bin")):
                    outcome = try_load(good | {key: data}, [key])
                    assert outcome != "right" or not _needed(key), f"{key} {way}"
                    ended[way, outcome] += 1
        outcome = try_load({other: data for other, data in good.items() if other != key}, [key])
        assert outcome != "right" or not _needed(key), f"{key} deleted"
        ended["deleted", outcome] += 1
    for swapped in _swaps(good):
        ended["swapped", try_load(good | swapped, list(swapped))] += 1
    return ended


def _swaps(good):
    """Pairs of files that change places; whole steps replayed under another's name."""
    keys = sorted(key for key in good if not key.startswith("probe"))
    yield from ({a: good[b], b: good[a]} for n, a in enumerate(keys) for b in keys[n + 1 :] if good[a] != good[b])
    for old in STEPS:
        for new in STEPS:
            files = [key for key in keys if _serves(key, new)]
            for some in (files, [key for key in files if key.startswith("steps")]) if old != new else ():
                yield {key: good[key.replace(f"{new:012d}-{new:06d}", f"{old:012d}-{old:06d}")] for key in some}


def _say(ended):
    print(f"corruption sweep: {sum(ended.values())} damages, 0 silent")
    for (way, outcome), count in sorted(ended.items()):
        print(f"    {way:12} {outcome:10} {count}")


def test_c40_sweep_of_every_file(good):
    ended = sweep(good, 1)
    _say(ended)
    assert sum(ended.values()) > 600
    assert {way for way, _ in ended} == {*WAYS, "deleted", "swapped"}
    assert {outcome for _, outcome in ended} == {"refused", "fell back", "right"}


@pytest.mark.slow
def test_c40_sweep_of_every_byte(good):
    ended = sweep(good, 12)
    _say(ended)
    assert sum(ended.values()) >= 5000


def test_bytes_behind_the_end_of_a_data_object_serve_nothing(good):
    key = next(key for key in good if key.startswith("steps/000000000003") and key.endswith(".bin"))
    targets = blank()
    loaded = load_newest(MemoryStore(good | {key: good[key] + b"junk"}), targets)
    assert loaded is not None and loaded.step == 3 and loaded.fell_back == []
    same(targets, 3)


@pytest.mark.parametrize("record", [b"", b"{}", b"[]", b'{"create_only": true', b"\xff", b"true"])
def test_a_damaged_record_of_the_probe_is_not_believed(good, record):
    """The store is tried out again, each time."""
    go_on(MemoryStore(good | {"probe/1.json": record}), {1, 2, 3}, 4)
