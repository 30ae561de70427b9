"""Pipeline schedules in numbers: microbatches in flight, idle time, and a simulation of any order of work.

P ranks of the pipeline, v pipeline stages on each, m microbatches. F is the time of a stage's forward pass for one
microbatch; B is that of its **whole** backward pass, W the part of B that makes the weights' gradients. (The paper on
zero-bubble schedules, arXiv 2401.10241, writes B for B - W.)"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORMULAS = {
    "1f1b": "(P-1)(F+B)",
    "gpipe": "(P-1)(F+B)",
    "interleaved": "(P-1)(F+B) (arXiv 2104.04473, section 2.2)",
    "looped-bfs": "(P-1)(F+B) (arXiv 2211.05953)",
    "interleaved-zero-bubble": "(P-1)(F+B-2W) (arXiv 2401.10241, ZB-H1)",
    "zbv": "(P-1)F where F = B-W = W (0 in arXiv 2401.10241: once begun, a rank never waits)",
    "dualpipev": "(P-1)(F&B+B-3W), F&B = F+B (DeepSeek-V3, arXiv 2412.19437, table 2)",
}
"""Idle time of a rank in a step by schedule, F, B and W being times of one pipeline stage. At the end all wait for
the last one, since the gradient norm is one number."""


def microbatches(schedule: str, pp: int, wanted: int) -> int:
    """The least number of microbatches from `wanted` on that the schedule can run; a step fills up with empty ones."""
    if schedule == "dualpipev":
        return max(wanted, 2 * pp)
    if schedule in ("interleaved", "interleaved-zero-bubble"):
        while wanted % max(1, wanted // pp):  # rounds of about P microbatches, all of one length
            wanted += 1
    return wanted


def in_flight(schedule: str, pp: int, per_rank: int, count: int, rank: int) -> int:
    """Most forward passes whose activations a rank holds at a time, in (pipeline stage, microbatch) pairs, with
    `count` microbatches, as `microbatches` gives them."""
    everything = count * per_rank
    if pp == 1:
        return 1
    match schedule:
        case "1f1b" if count >= pp:  # below, the pipeline is never full: all forward passes, then all backward ones
            return pp - rank
        case "interleaved":
            a_round = count // max(1, count // pp)
            return min(everything, (per_rank - 1) * a_round + 2 * (pp - 1 - rank) + 1)
        case "interleaved-zero-bubble" | "zbv":
            return min(everything, per_rank * pp)
        case "dualpipev":
            return min(everything, 2 * pp + 1)
        case _:
            return everything


def bubble(schedule: str, pp: int, per_rank: int, count: int, forward: float = 1.0, weight: float = 1.0) -> float:
    """The share of a step in which a rank waits for others, by FORMULAS, where a stage's forward pass takes `forward`
    and the two halves of its backward pass `weight` and as long as the forward pass."""
    F, W = forward, weight
    B = F + W
    idle = {
        "interleaved-zero-bubble": (pp - 1) * (F + B - 2 * W),
        "zbv": (pp - 1) * F,
        "dualpipev": (pp - 1) * (F + B + B - 3 * W),
    }.get(schedule, (pp - 1) * (F + B))
    return idle / (idle + count * per_rank * (F + B)) if pp > 1 else 0.0


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


def orders_1f1b(pp: int, count: int) -> list[list[Work]]:
    """The order of 1F1B: warm-up, then one forward and one backward in turn, then the rest."""
    found = []
    for rank in range(pp):
        warm = min(count, pp - 1 - rank)
        order = [Work("F", rank, i) for i in range(warm)]
        for i in range(count - warm):
            order += [Work("F", rank, warm + i), Work("B", rank, i)]
        found.append(order + [Work("B", rank, i) for i in range(count - warm, count)])
    return found
