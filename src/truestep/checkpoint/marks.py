"""What became of a checkpoint after its commit: create-only sealed marks beside it. Torch-free.

    marks/<step>-<epoch>/<kind>-<n>

    verified      every byte was read and is right: `level` "written", "scrub", "load" or "replay"
    drilled       its restore was tried out: `level` as above, and what else the drill found
    quarantined   readers pass it over; `reason` says why            released ends that
    pinned        retention leaves it alone                          unpinned ends that
    deleting      retention has begun to delete it                   kept ends that, if the commit is still there

Nothing is ever changed: of a pair the mark with the higher number counts, and the one that protects if both have the
same. A damaged mark protects too: quarantined, pinned and deleting count as set, all other kinds as if not there.
"""

import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from truestep.checkpoint.clearing import remove_empty
from truestep.checkpoint.sealed import Committed, seal, unseal
from truestep.errors import CheckpointError
from truestep.storage.interface import KeyExists, MissingKey, Store, remove

Kind = Literal["verified", "drilled", "quarantined", "released", "pinned", "unpinned", "deleting", "kept"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PAIRS: dict[Kind, Kind] = {"quarantined": "released", "pinned": "unpinned", "deleting": "kept"}
LEVELS = ("written", "scrub", "load", "replay")
"""How far a checkpoint was checked, from least to most. "written" is what every commit has: sizes, but no byte read."""

FOLDER = "marks"
_MARK = re.compile(r"marks/(\d{12}-\d{6})/([a-z]+)-(\d{6})")


@dataclass(frozen=True)
class Mark:
    """One mark. `damaged` ones have no facts and no time."""

    kind: Kind
    number: int
    at_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    damaged: bool = False


@dataclass(frozen=True)
class Standing:
    """What all marks of a checkpoint say together. `quarantined` is the reason; `notes` names damaged marks."""

    verified: str | None = None
    drilled: Mark | None = None
    quarantined: str | None = None
    pinned: bool = False
    deleting: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_verified(self) -> bool:
        """Whether every byte was read and found right, here or by a drill."""
        return self.verified is not None and LEVELS.index(self.verified) >= LEVELS.index("scrub")


def mark(store: Store, committed: Committed, kind: Kind, /, **facts: Any) -> Mark:
    """Add a mark; `facts` are plain JSON. Its number is higher than that of every mark that was there before."""
    if kind not in KINDS:
        raise CheckpointError(f"{kind!r} is not a kind of mark; use one of {', '.join(KINDS)}")
    number = 1 + max((found.number for _, found in _keys(store, committed.name)), default=0)
    while True:
        at_s = round(time.time(), 3)
        body = {"commit": committed.key, "kind": kind, "number": number, "at_s": at_s, "facts": facts}
        store.event(f"mark {kind} to be created")
        try:
            store.create(_key(committed, kind, number), seal(body))
        except KeyExists:  # another process was quicker, or the answer to our own first try was lost
            number += 1
            continue
        store.event(f"mark {kind} created")
        return Mark(kind, number, at_s, facts)


def marks_of(store: Store, kinds: Collection[Kind] = KINDS) -> dict[Committed, list[Mark]]:
    """All marks of these kinds, of every commit that has any (also of deleted ones), lowest number first."""
    found: dict[Committed, list[Mark]] = {}
    for committed, named in _keys(store):
        if named.kind in kinds and (read := _read(store, committed, named)):
            found.setdefault(committed, []).append(read)
    return found


def marks_on(store: Store, committed: Committed) -> list[Mark]:
    """All marks of one commit, lowest number first."""
    read = [_read(store, committed, named) for _, named in _keys(store, committed.name)]
    return [each for each in read if each]


def standing(marks: Iterable[Mark]) -> Standing:
    """What the marks of one checkpoint say together."""
    marks = list(marks)
    verified = [each for each in marks if each.kind == "verified" and not each.damaged]
    drilled = [each for each in marks if each.kind == "drilled" and not each.damaged]
    level = max(map(_level, verified + drilled), default=-1)
    reason = _last(marks, "quarantined")
    notes = tuple(f"its mark {each.kind}-{each.number:06d} is damaged" for each in marks if each.damaged)
    return Standing(
        verified=LEVELS[level] if level >= 0 else None,
        drilled=max(drilled, key=lambda each: each.at_s, default=None),
        quarantined=str(reason.facts.get("reason", "its mark is damaged")) if reason else None,
        pinned=_last(marks, "pinned") is not None,
        deleting=_last(marks, "deleting") is not None,
        notes=notes,
    )


def quarantined(store: Store) -> set[str]:
    """Keys of the commits that readers pass over."""
    return _set(store, "quarantined")


def pinned(store: Store) -> set[str]:
    """Keys of the commits that retention leaves alone."""
    return _set(store, "pinned")


def being_deleted(store: Store) -> set[str]:
    """Keys of the commits whose deletion has begun; those of them that are gone are gone on purpose."""
    return _set(store, "deleting")


def forget_marks(store: Store, committed: Committed) -> None:
    """Remove the marks of a commit that is gone, those that say it was deleted last."""
    for _, named in sorted(_keys(store, committed.name), key=lambda pair: pair[1].kind == "deleting"):
        remove(store, _key(committed, named.kind, named.number))
    remove_empty(store, f"{FOLDER}/{committed.name}")


def _set(store: Store, kind: Kind) -> set[str]:
    """Which commits a mark of `kind` stands on. Only what may end it is read; that it was set, its name says."""
    ends: dict[Committed, list[Mark]] = {}
    for committed, named in _keys(store):
        if named.kind in (kind, PAIRS[kind]):
            ends.setdefault(committed, []).append(named)
    found = set()
    for committed, names in ends.items():
        read = [_read(store, committed, named) if named.kind == PAIRS[kind] else named for named in names]
        if _last([each for each in read if each], kind):
            found.add(committed.key)
    return found


def _last(marks: Iterable[Mark], kind: Kind) -> Mark | None:
    """The mark of `kind` that no later intact one of its pair has ended."""
    ends = max((m.number for m in marks if m.kind == PAIRS[kind] and not m.damaged), default=0)
    return max((m for m in marks if m.kind == kind and m.number >= ends), key=lambda m: m.number, default=None)


def _level(found: Mark) -> int:
    level = found.facts.get("level")
    return LEVELS.index(level) if level in LEVELS else -1


def _key(committed: Committed, kind: str, number: int) -> str:
    return f"{FOLDER}/{committed.name}/{kind}-{number:06d}"


def _keys(store: Store, name: str = "") -> list[tuple[Committed, Mark]]:
    """Marks by their keys alone, lowest number first."""
    found = []
    for entry in store.list(f"{FOLDER}/{name}" if name else FOLDER):
        match = _MARK.fullmatch(entry.key)
        committed = match and Committed.parse(f"commits/{match[1]}")
        if match and committed and match[2] in KINDS:
            found.append((committed, Mark(cast(Kind, match[2]), int(match[3]))))
    return sorted(found, key=lambda pair: (pair[0], pair[1].number))


def _read(store: Store, committed: Committed, named: Mark) -> Mark | None:
    """The whole mark; None if it was taken away meanwhile."""
    key = _key(committed, named.kind, named.number)
    try:
        body = unseal(store.get(key), f"{store.url}/{key}")
        if (body["commit"], body["kind"], body["number"]) != (committed.key, named.kind, named.number):
            raise CheckpointError(f"{store.url}/{key}: holds another mark; it was swapped")
        return Mark(named.kind, named.number, float(body["at_s"]), dict(body["facts"]))
    except MissingKey:
        return None
    except (CheckpointError, KeyError, TypeError, ValueError):
        return Mark(named.kind, named.number, damaged=True)
