"""Which rank the others wait for, told from outside by their counters and by what their processes do. Torch-free.

A rank that hangs stops all: the others wait for it in the next collective. `HangWatch` sees that nothing moves any
more, and `lagging` says who is to blame, by the first of these that singles one rank out:

    1. its process is stopped (SIGSTOP, a debugger, a frozen control group)
    2. it is behind the others: in an earlier step, or an earlier section of the step
    3. it is in no collective, while the others are
    4. it uses its processor, while the others sleep: they wait and it does not
    5. it is behind by microbatches, or by collectives (where all ranks have the same to do)

Where nothing does, nobody is named.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from truestep.runlog.counters import SectionOf

Row = Mapping[str, int]
"""A rank's counters (truestep.runlog.counters), with what `observed` adds where that is known."""

IN_ORDER = (
    SectionOf.START,
    SectionOf.DATA,
    SectionOf.COMPUTE,
    SectionOf.REDUCE,
    SectionOf.UPDATE,
    SectionOf.OTHER,
    SectionOf.EVALUATE,
    SectionOf.SAVE,
)
"""Sections as they follow one another from the beginning of a step."""
BUSY, TIMES = 20, 4
"""Percent of a processor from which a rank may be computing, and how many times as much as any other one it uses."""
_MOVES = ("pid", "step", "section", "microbatch", "collective", "inside")
_DOING = {
    SectionOf.START: "starting",
    SectionOf.DATA: "waiting for its data",
    SectionOf.COMPUTE: "in forward or backward",
    SectionOf.REDUCE: "adding gradients up",
    SectionOf.UPDATE: "updating its weights",
    SectionOf.SAVE: "saving",
    SectionOf.EVALUATE: "evaluating",
    SectionOf.OTHER: "between steps",
}


@dataclass(frozen=True)
class Verdict:
    """`rank` is the one that the others wait for; None where none is singled out. `why`: in words that follow it."""

    rank: int | None
    why: str


@dataclass(frozen=True)
class Hang:
    """Nothing has moved for `seconds`."""

    verdict: Verdict
    seconds: float
    rows: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """A sentence for the log."""
        who = "no rank can be named" if self.verdict.rank is None else f"rank {self.verdict.rank}"
        return f"no rank has moved for {self.seconds:.3g} s: {who} {self.verdict.why}".rstrip()


def lagging(rows: Mapping[int, Row], alike: bool = True) -> Verdict:
    """The rank that the others wait for, of ranks that stand still. `alike`: all have the same microbatches and
    collectives in the same order, which the ranks of a pipeline have not."""
    stopped = sorted(rank for rank, row in rows.items() if row.get("stopped"))
    if stopped:
        more = f" (and so are ranks {', '.join(map(str, stopped[1:]))})" if stopped[1:] else ""
        return Verdict(stopped[0], f"is stopped by a signal or a debugger, {_where(rows[stopped[0]])}{more}")
    suspects = _least(rows, rows, _position)
    if len(suspects) == 1 < len(rows):
        ahead = next(row for rank, row in rows.items() if rank not in suspects)
        return Verdict(suspects[0], f"is behind: {_where(rows[suspects[0]])}, another one is {_where(ahead)}")
    outside = _least(rows, suspects, lambda row: row["inside"])
    if len(outside) == 1 < len(suspects):
        return Verdict(outside[0], f"is in no collective, {_where(rows[outside[0]])}, while the others wait in one")
    busy = _busy(rows, suspects)
    if busy is not None:
        return Verdict(busy, f"computes, {_where(rows[busy])}, while the others wait")
    if alike and len(rows) > 2:
        behind = _least(rows, suspects, lambda row: (row["microbatch"], row["collective"]))
        if len(behind) == 1 < len(suspects):
            row = rows[behind[0]]
            done = f"microbatch {row['microbatch']}, collective {row['collective']} of the step"
            return Verdict(behind[0], f"is behind: {done}, {_where(row)}")
    return Verdict(None, "")


def observed(rows: Sequence[Row]) -> list[dict[str, int]]:
    """The counters of processes of this machine, with `stopped` (0 or 1) and `cpu_ms` that the main thread has used."""
    return [dict(row) | _process(row["pid"]) for row in rows]


@dataclass
class HangWatch:
    """`deadline_s`: how long all ranks may stand still, by the clock of the host that calls (`now_s`). A job that is
    only starting is not judged: that takes as long as it takes."""

    deadline_s: float
    alike: bool = True
    now_s: Callable[[], float] = time.monotonic
    _seen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _since_s: float = 0.0
    _cpu_ms: dict[int, int] = field(default_factory=dict)  # when all came to a stand
    _told: bool = False

    def look(self, rows: Sequence[Row], world: int) -> Hang | None:
        """Call it now and then with the counters of all ranks. A hang is told of once."""
        by_rank = {row["rank"]: dict(row) for row in rows}
        seen = {rank: tuple(row[name] for name in _MOVES) for rank, row in by_rank.items()}
        starting = any(row["section"] == SectionOf.START for row in by_rank.values())
        if seen != self._seen or starting or len(by_rank) < world:
            self._seen, self._since_s, self._told = seen, self.now_s(), False
            self._cpu_ms = {rank: row["cpu_ms"] for rank, row in by_rank.items() if "cpu_ms" in row}
            return None
        still_s = self.now_s() - self._since_s
        if self._told or still_s < self.deadline_s:
            return None
        self._told = True
        for rank, row in by_rank.items():
            if rank in self._cpu_ms:
                row["cpu_percent"] = round((row["cpu_ms"] - self._cpu_ms[rank]) / (10 * max(still_s, 1e-3)))
        return Hang(lagging(by_rank, self.alike), still_s, by_rank)


def _position(row: Row) -> tuple[int, int]:
    return row["step"], IN_ORDER.index(SectionOf(row["section"]))


def _least(rows: Mapping[int, Row], ranks: Collection[int], key: Callable[[Row], object]) -> list[int]:
    """Those of the ranks whose key is the smallest."""
    keys = {rank: key(rows[rank]) for rank in ranks}
    return [rank for rank in sorted(ranks) if keys[rank] == min(keys.values())]  # pyright: ignore[reportArgumentType]


def _busy(rows: Mapping[int, Row], suspects: Sequence[int]) -> int | None:
    shares = sorted((rows[rank].get("cpu_percent", -1), rank) for rank in suspects)
    if len(shares) < 2 or shares[0][0] < 0:
        return None
    (second, _), (most, busiest) = shares[-2:]
    return busiest if most >= max(BUSY, TIMES * second) else None


def _where(row: Row) -> str:
    section = SectionOf(row["section"])
    inside = ", in a collective" if row["inside"] else ""
    return f"{_DOING[section]} in step {row['step'] + 1}{inside}"  # it counts those that were done before


def _process(pid: int) -> dict[str, int]:
    """Of its main thread. Nothing where the system has no /proc, or the process is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return {"stopped": int(fields[0] in "Tt"), "cpu_ms": 1000 * ticks // os.sysconf("SC_CLK_TCK")}
    return {}
