"""Before the first step: every rank hands known words to the next one, and all of them sum known integers.

Rounds between neighbours and one all-reduce, whatever the number of ranks. A rank whose links on both sides are bad is
named; of one bad link only both ends can be.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from truestep.numerics.fixed_point import GOLDEN
from truestep.parallel.job import Job

WORDS = 1 << 15
"""Of 8 bytes; what a message holds."""
ROUNDS = 3
SLOW_TIMES, SLOW_S = 10.0, 0.05
"""A link is slow that takes so many times as long as the median one, and so long at least."""

Strike = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Row:
    """What one rank saw: the seconds of its quickest receipt from the rank before it, how many words of all receipts
    were wrong, and how many of the sum."""

    seconds: float
    wrong: int
    wrong_sum: int


@dataclass(frozen=True)
class BadLink:
    """`ranks`: the one at fault if `named`, otherwise those between which it lies."""

    what: Literal["corrupt", "slow"]
    ranks: tuple[int, ...]
    named: bool
    text: str


def preflight(job: Job, strike: Strike | None = None) -> list[BadLink]:
    """Try the links of the job's data group. The same result on every rank. Collective. `strike` is where tests get at
    what was received."""
    if job.world == 1:
        return []
    seconds, wrong = _ring(job, strike)
    mine = torch.tensor([seconds, float(wrong), float(_sum(job))], dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(job.world)]
    dist.all_gather(rows, mine, group=job.control)
    return bad_links([Row(each[0].item(), int(each[1]), int(each[2])) for each in rows])


def bad_links(rows: Sequence[Row]) -> list[BadLink]:
    """From what each rank saw, who has bad links."""
    median = statistics.median(row.seconds for row in rows)
    bound = max(SLOW_TIMES * median, SLOW_S)
    corrupt = [rank for rank, row in enumerate(rows) if row.wrong]
    found = _of("corrupt", corrupt, len(rows), lambda rank: f"{rows[rank].wrong} words arrived changed")
    odd = [rank for rank, row in enumerate(rows) if row.wrong_sum]
    if odd and not corrupt:
        named = 2 * len(odd) < len(rows) and len(odd) == 1
        ranks = tuple(odd) if named else tuple(range(len(rows)))
        found.append(BadLink("corrupt", ranks, named, f"a sum of integers over all ranks is wrong on ranks {odd}"))
    slow = [rank for rank, row in enumerate(rows) if row.seconds > bound and rank not in corrupt]
    words = "a message of {:.0f} KiB took {:.1f} ms, {:.1f} ms at the median"
    size = WORDS * 8 / 1024
    return found + _of("slow", slow, len(rows), lambda rank: words.format(size, rows[rank].seconds * 1e3, median * 1e3))


def _of(
    what: Literal["corrupt", "slow"], receivers: Sequence[int], world: int, say: Callable[[int], str]
) -> list[BadLink]:
    """Bad links by their receivers. Where that of a rank and that of the next one are bad, the rank is named."""
    found, left = [], set(receivers)
    if world > 2:
        for rank in receivers:
            if {rank, (rank + 1) % world} <= left:
                left -= {rank, (rank + 1) % world}
                found.append(BadLink(what, (rank,), True, f"to and from rank {rank}, {say(rank)}"))
    for rank in sorted(left):
        before = (rank - 1) % world
        found.append(BadLink(what, (before, rank), False, f"from rank {before} to rank {rank}, {say(rank)}"))
    return found


def _ring(job: Job, strike: Strike | None) -> tuple[float, int]:
    """Seconds of the quickest round, and words that arrived changed in any."""
    before, after = (job.rank - 1) % job.world, (job.rank + 1) % job.world
    best, wrong = float("inf"), 0
    for turn in range(ROUNDS + 1):
        sent, due = _words(job, job.rank, turn), _words(job, before, turn)
        arrived = torch.zeros_like(due)
        job.all_sum([0.0])  # all begin at the same time
        began = time.perf_counter()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, arrived, before)])
        for work in works:
            work.wait()
        if strike is not None:
            strike(arrived)
        wrong += int((arrived != due).sum())  # waits for the device
        if turn:  # the first one opens connections
            best = min(best, time.perf_counter() - began)
    return best, wrong


def _sum(job: Job) -> int:
    """Words of a sum over all ranks that are wrong."""
    total = sum(range(job.world))
    mine = _words(job, 0, 0) + job.rank
    dist.all_reduce(mine)
    return int((mine != _words(job, 0, 0) * job.world + total).sum())


def _words(job: Job, rank: int, turn: int) -> torch.Tensor:
    start = (rank * (ROUNDS + 1) + turn) * WORDS
    return torch.arange(start, start + WORDS, device=job.device).mul_(GOLDEN)
