"""How one attempt goes: which rank ended how, which waits for a new group, and what that means. Pure.

Exit codes of a worker: 0 done or stopped politely, 1 a gate did not pass, 2 a UserError, 75 `Again`; anything else, and
any signal, is a crash.
"""

import signal
from dataclasses import dataclass, field, replace
from typing import Any, Literal

GATE, REFUSED, AGAIN, CRASHED, GONE = 1, 2, 75, 70, 255
"""CRASHED is the exit code of an exception that nobody expected, GONE stands for that of a worker that is gone without
a word; other codes and signals are crashes too."""
Kind = Literal["ended", "gate", "refused", "again", "broken", "interrupted"]


@dataclass(frozen=True)
class Fault:
    """The first thing that went wrong. `host` is None where nobody knows whose fault it is."""

    kind: Literal["exit", "lost", "hang"]
    text: str
    at_s: float
    rank: int | None = None
    host: str | None = None
    code: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass
class Attempt:
    """The ranks of one start. Every rank is told of once: ended, waiting, or lost with its host. `echoes` are ranks
    that ended only because somebody made them: they prove nothing."""

    hosts: list[str]  # of each rank
    ended: dict[int, int] = field(default_factory=dict)  # rank -> exit code
    waiting: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    echoes: set[int] = field(default_factory=set)
    fault: Fault | None = None
    step: int | None = None  # the furthest of those that ended
    asked: bool = False  # to stop politely
    interrupted: bool = False  # and a rank could not: it was not in its loop. What follows is nobody's fault

    @property
    def world(self) -> int:
        return len(self.hosts)

    @property
    def running(self) -> set[int]:
        """Ranks of which nothing was heard yet."""
        return set(range(self.world)) - self.ended.keys() - self.waiting - self.lost

    @property
    def settled(self) -> bool:
        return not self.running

    @property
    def disturbed(self) -> bool:
        """Whether some ranks are out while others may still wait for them."""
        return bool(self.waiting or self.lost or any(code != 0 for code in self.ended.values()))

    def end(self, rank: int, code: int, at_s: float, step: int | None = None) -> None:
        """A worker ended with an exit code (negative: by that signal), at `step` where that is known. torchrun sends
        SIGTERM to the others once one has failed, so that signal proves nothing then."""
        if step is not None:
            self.step = max(step, self.step or 0)
        if self.asked and code in (-signal.SIGINT, 128 + signal.SIGINT) and self.fault is None:
            self.interrupted = True
        if self.interrupted or (code == -signal.SIGTERM and self.disturbed):
            self.echoes.add(rank)
        self.waiting.discard(rank)
        self.ended[rank] = code
        if crash(code) and rank not in self.echoes:
            text = f"rank {rank} on host {self.hosts[rank]} {how(code)}"
            self._blame(Fault("exit", text, at_s, rank, self.hosts[rank], code))

    def wait(self, rank: int, why: str, at_s: float) -> None:
        """A worker's group broke, and it waits for orders."""
        if rank not in self.ended:
            self.waiting.add(rank)
            self._blame(Fault("exit", why, at_s))

    def lose(self, host: str, why: str, at_s: float) -> None:
        """A host is gone, with all its ranks."""
        ranks = {rank for rank, name in enumerate(self.hosts) if name == host} - self.ended.keys()
        if ranks:
            self.lost |= ranks
            self.waiting -= ranks
            self._blame(Fault("lost", f"host {host} {why}", at_s, min(ranks) if len(ranks) == 1 else None, host))

    def hang(self, rank: int | None, text: str, at_s: float, evidence: dict[str, Any]) -> None:
        """The ranks do not go on, and `rank` is the one that the others wait for, if it is known."""
        host = None if rank is None else self.hosts[rank]
        self._blame(Fault("hang", text, at_s, rank, host, evidence=evidence))

    def condemn(self) -> set[int]:
        """The ranks that still run are to be ended; how they end proves nothing."""
        self.echoes |= self.running
        return self.running

    def _blame(self, fault: Fault) -> None:
        """The first that can be named, at the time of the first of all."""
        if self.interrupted:
            return
        if self.fault is None:
            self.fault = fault
        elif self.fault.host is None and fault.host is not None:
            self.fault = replace(fault, at_s=self.fault.at_s)

    def verdict(self) -> Kind:
        """What a settled attempt comes to. A crash outweighs the sentence of those who only heard of it."""
        if self.interrupted:
            return "interrupted"
        codes = {code for rank, code in self.ended.items() if rank not in self.echoes}
        if self.lost or any(map(crash, codes)) or (self.fault is not None and self.fault.kind == "hang"):
            return "broken"
        if AGAIN in codes:
            return "again"
        if REFUSED in codes:
            return "refused"
        if self.fault is not None:
            return "broken"
        return "gate" if GATE in codes else "ended"


def crash(code: int) -> bool:
    return code not in (0, GATE, REFUSED, AGAIN)


def how(code: int) -> str:
    """An exit code in words that follow a name."""
    if code == GONE:
        return "is gone without a word"
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"
