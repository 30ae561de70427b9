"""How ranks agree: JSON in the job's key-value store, with deadlines. No process group takes part."""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from truestep.checkpoint.catalogue import Superseded
from truestep.errors import CheckpointError

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.001, 0.25


class _Names:
    """Keeps the keys of the groups of one job apart, whose ranks may be of different age."""

    numbers = itertools.count()


def begin_job() -> None:
    """This process has joined a job, with a store of its own: the names of groups begin anew, as on every rank."""
    _Names.numbers = itertools.count()


class Abandoned(CheckpointError):
    """Another rank failed, or did not answer in time."""


class KeyValue(Protocol):
    """What is used of a c10d store (torch.distributed.Store)."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def clone(self) -> "KeyValue": ...


class Alone:
    """The key-value store of a lone process: a dict."""

    def __init__(self):
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str, /) -> bool:
        return self.values.pop(key, None) is not None

    def clone(self) -> "Alone":
        return self


@dataclass
class Group:
    """The ranks that save and load together, and the c10d store through which they talk."""

    kv: KeyValue
    prefix: str
    rank: int
    world: int
    deadline_s: float
    rounds: int = field(default=0)
    stopped: threading.Event = field(default_factory=threading.Event)

    @staticmethod
    def of(
        kv: KeyValue | None,
        rank: int,
        world: int,
        deadline_s: float,
        name: str = "load",
        stopped: threading.Event | None = None,
    ) -> "Group":
        """A group over `kv`; a lone process needs none. Every rank makes the same groups in the same order. `stopped`
        ends every wait once it is set."""
        if kv is None:
            if world != 1:
                raise CheckpointError(f"{world} ranks cannot agree on a checkpoint without a key-value store; give one")
            kv = Alone()
        prefix = f"checkpoint/{name}/{next(_Names.numbers)}"
        return Group(kv, prefix, rank, world, deadline_s, stopped=stopped or threading.Event())

    def round(self, kind: str) -> "Round":
        """The next round; every rank starts the same rounds in the same order."""
        self.rounds += 1
        return Round(self, f"{self.prefix}/{kind}/{self.rounds}", time.monotonic() + self.deadline_s)

    def agree(self, kind: str, error: Exception | None) -> dict[str, str]:
        """The first failure of each class (by name) among all ranks, as a sentence; empty if every rank is well.

        All ranks call this.
        """
        mine = {type(error).__name__: f"rank {self.rank}: {error}"} if error else {}
        return self._merged(kind, mine, lambda votes: dict(pair for vote in reversed(votes) for pair in vote.items()))

    def share(self, kind: str, value: Any) -> Any:
        """Rank 0's JSON value, on all ranks."""
        step = self.round(kind)
        if self.rank == 0:
            step.post("value", value)
        return step.take("value")

    def union(self, kind: str, names: Collection[str]) -> set[str]:
        """The names that any rank gave, on all ranks, which all call this."""
        return set(self._merged(kind, sorted(names), lambda parts: sorted(set().union(*parts))))

    def total(self, kind: str, counts: Mapping[str, int]) -> dict[str, int]:
        """Counts by name, summed over all ranks, on all ranks, which all call this; without those that are 0."""
        return self._merged(kind, dict(counts), lambda parts: dict(sum(map(Counter, parts), Counter())))

    def _merged(self, kind: str, mine: Any, merge: Callable[[list[Any]], Any]) -> Any:
        """What rank 0 makes of every rank's JSON value, which it has in rank order; on all ranks."""
        step = self.round(kind)
        step.post(f"mine/{self.rank}", mine)
        if self.rank == 0:
            step.post("merged", merge(step.gather("mine")))
        return step.take("merged")


class Round:
    """Messages of one save or one vote. A failure posted by any rank ends every wait of the others."""

    def __init__(self, group: Group, name: str, deadline: float):
        self.group, self.name, self.deadline = group, name, deadline

    def post(self, key: str, value: Any) -> None:
        self.group.kv.set(f"{self.name}/{key}", json.dumps(value))

    def fail(self, reason: str, superseded: bool = False) -> None:
        """Tell the others to abandon this round."""
        self.post("failed", {"reason": f"rank {self.group.rank}: {reason}", "superseded": superseded})

    def check(self, late: str = "it took longer") -> None:
        """Abandoned (or Superseded) if a rank failed, the deadline has passed (`late`) or the process is ending."""
        kv = self.group.kv
        if kv.check([f"{self.name}/failed"]):
            failed = json.loads(kv.get(f"{self.name}/failed"))
            raise (Superseded if failed["superseded"] else Abandoned)(failed["reason"])
        if time.monotonic() > self.deadline:
            raise Abandoned(f"{late} than {self.group.deadline_s:g} s")
        if self.group.stopped.is_set():
            raise Abandoned("this process is ending, or another one is gone")

    def take(self, key: str) -> Any:
        """Wait for a message; Abandoned (or Superseded) if a rank failed or the deadline passed.

        Polls with growing pauses: c10d stores cannot wait for either of two keys, nor time out in silence.
        """
        kv, wait_s = self.group.kv, SHORTEST_WAIT_S
        while not kv.check([f"{self.name}/{key}"]):
            self.check(f"no answer ({self.name}/{key}) for longer")
            self.group.stopped.wait(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return json.loads(kv.get(f"{self.name}/{key}"))

    def take_once(self, key: str) -> Any:
        """Like take, for a message with one reader: it is removed."""
        value = self.take(key)
        self.group.kv.delete_key(f"{self.name}/{key}")
        return value

    def gather(self, key: str) -> list[Any]:
        """One message of every rank, in rank order."""
        return [self.take_once(f"{key}/{rank}") for rank in range(self.group.world)]
