"""A simulation of any order of a pipeline's work: when it ends, how long ranks wait, what they hold."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from truestep.parallel.schedule import orders


class Work(NamedTuple):
    """One piece of a rank's work. kind: "F" forward, "B" whole backward, "I" backward to the input only, "W" to the
    weights only."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Timeline:
    """What a simulation gives: the end of the step, the share of idle time over all ranks, and for each rank the most
    (stage, microbatch) pairs whose activations it held."""

    end: float
    idle: float
    in_flight: list[int]


def simulate(orders: Sequence[Sequence[Work]], times: Mapping[str, float], stages: int) -> Timeline:
    """Run each rank's work in its order, a piece as soon as what it needs is there. `times` by kind. Sending takes no
    time. Raises ValueError where ranks wait for each other for ever."""
    ends: dict[Hashable, float] = {}
    clocks, busy, heads = [0.0] * len(orders), 0.0, [0] * len(orders)
    while any(head < len(order) for head, order in zip(heads, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while heads[rank] < len(order):
                work = order[heads[rank]]
                needs = [ends.get(need) for need in _needs(work, stages)]
                if None in needs:
                    break
                clocks[rank] = max(clocks[rank], *(end for end in needs if end is not None), 0.0) + times[work.kind]
                busy += times[work.kind]
                for done in _gives(work):
                    ends[done] = clocks[rank]
                heads[rank] += 1
                moved = True
        if not moved:
            raise ValueError("the orders of the ranks wait for each other")
    end = max(clocks)
    return Timeline(end, 1 - busy / (end * len(orders)), [_most_held(order) for order in orders])


def _needs(work: Work, stages: int) -> list[Hashable]:
    if work.kind == "F":
        return [("F", work.stage - 1, work.microbatch)] if work.stage else []
    if work.kind == "W":
        return [("I", work.stage, work.microbatch)]
    later = [("I", work.stage + 1, work.microbatch)] if work.stage + 1 < stages else []
    return [("F", work.stage, work.microbatch), *later]


def _gives(work: Work) -> list[Hashable]:
    return [("I" if work.kind == "B" else work.kind, work.stage, work.microbatch)]


def _most_held(order: Sequence[Work]) -> int:
    held = most = 0
    for work in order:
        held += {"F": 1, "B": -1, "W": -1, "I": 0}[work.kind]
        most = max(most, held)
    return most


def orders_of_ours(schedule: str, pp: int, per_rank: int, count: int) -> list[list[Work]]:
    """What the ranks compute in the order that this project carries out."""
    rows = orders(schedule, pp, per_rank, count)
    return [[Work(a.what, a.part, a.microbatch) for a in row.actions if a.what in "FBIW"] for row in rows]
