"""The order in which each rank of a pipeline works: compute, sends and receives, as torch's schedules have it.

torch.distributed.pipelining makes the orders (1F1B arXiv 2104.04473, looped BFS 2211.05953, zero bubble 2401.10241,
DualPipe 2412.19437); they are carried out by `pipeline.py`. Its names without documentation are used here only.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action, _add_send_recv

from truestep.plan.split import stages_of_rank
from truestep.recipe.machine import FOLDED

_TORCH = {
    "gpipe": "GPipe",
    "looped-bfs": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}

SPLIT_BACKWARD = frozenset({*FOLDED, "interleaved-zero-bubble"})
"""Schedules that do the backward pass of inputs and that of weights apart."""


@dataclass(frozen=True)
class Action:
    """`what`: F (forward), B (backward), I and W (backward of inputs, of weights), SEND_F, RECV_F, SEND_B, RECV_B."""

    what: str
    part: int
    microbatch: int


@dataclass(frozen=True)
class Order:
    """`actions` of one rank for a step of `num_microbatches`, padding counted."""

    num_microbatches: int
    actions: tuple[Action, ...]


def rank_of_part(schedule: str, num_ranks: int, per_rank: int) -> Callable[[int], int]:
    ranks = {part: rank for rank in range(num_ranks) for part in stages_of_rank(schedule, num_ranks, per_rank, rank)}
    return ranks.__getitem__


@cache
def orders(schedule: str, num_ranks: int, per_rank: int, num_microbatches: int) -> tuple[Order, ...]:
    """The order of every rank. A schedule that cannot do this number of microbatches gets more; those are padding."""
    for number in range(num_microbatches, num_microbatches + 4 * num_ranks * per_rank):
        try:
            compute = _compute(schedule, num_ranks, per_rank, number)
        except ValueError:
            continue
        rows = _add_send_recv(compute, rank_of_part(schedule, num_ranks, per_rank), num_ranks * per_rank)
        return tuple(Order(number, tuple(x for a in rows[rank] for x in _plain(a))) for rank in range(num_ranks))
    raise AssertionError(f"{schedule} has no order for {num_microbatches} microbatches on {num_ranks} ranks")


def _compute(schedule: str, num_ranks: int, per_rank: int, number: int) -> dict[int, list[_Action]]:
    if schedule == "1f1b":  # torch's table of it starts later ranks at a later microbatch
        return {rank: _one_forward_one_backward(rank, num_ranks, number) for rank in range(num_ranks)}
    found = get_schedule_ops(_TORCH[schedule], num_ranks, number, per_rank)
    return {rank: [a for a in row if a is not None and _computes(a)] for rank, row in enumerate(found)}


def _one_forward_one_backward(rank: int, num_ranks: int, number: int) -> list[_Action]:
    """As many forward passes as there are ranks behind this one, then one backward pass after each."""
    ahead = min(num_ranks - 1 - rank, number)
    order = [f"{rank}F{i}" for i in range(ahead)]
    for i in range(number):
        order += [f"{rank}F{i + ahead}"] * (i + ahead < number) + [f"{rank}B{i}"]
    actions = [_Action.from_str(text) for text in order]
    return [action for action in actions if action is not None]


def _computes(action: _Action) -> bool:
    return action.sub_actions is not None or _plain(action)[0].what in ("F", "I", "W", "B")


def _plain(action: _Action) -> list[Action]:
    """An action, or the two that a schedule means to overlap one after the other. Its kind is read off its text, which
    is the same in all versions."""
    if action.sub_actions is not None:
        return [plain for part in action.sub_actions for plain in _plain(part)]
    match = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", str(action))
    assert match is not None, str(action)
    part, what, microbatch = match.groups()
    return [Action(what, int(part), int(microbatch or -1))]
