"""Work on whole matrices of which many ranks hold parts: each matrix goes to one owner and its result comes back.

Ranks are those of one group. A tensor is a matrix, or a stack of matrices to be worked on one by one; a rank holds a
box of it, or nothing, and several ranks may hold the same box. Owners are chosen among those that hold a part, so a
matrix that lies whole on one rank does not travel.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, pairwise
from math import prod

import torch
import torch.distributed as dist

from truestep.numerics.boxes import Box, Layout, cover_problem
from truestep.numerics.pieces import span

_BUCKET_ELEMENTS = 1 << 26
_RUN_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class Run:
    """What one owner works on at a time: a matrix, or neighbours in a stack that the same ranks hold. `first`: index of
    the first one in the whole stack; `held`: the boxes of ranks that hold a part, counted from the run's beginning."""

    shape: tuple[int, ...]
    first: int
    held: Mapping[int, Box]

    @cached_property
    def holders(self) -> dict[Box, list[int]]:
        """Ranks by their box."""
        found: dict[Box, list[int]] = {}
        for rank, box in self.held.items():
            found.setdefault(box, []).append(rank)
        return found


@dataclass(frozen=True)
class Task:
    """`run` of tensor number `tensor`, and who does the work."""

    tensor: int
    run: Run
    owner: int

    def source(self, box: Box) -> int:
        """Of the ranks that hold `box` the one that sends it to the owner: the nearest in rank order."""
        return min(self.run.holders[box], key=lambda rank: (abs(rank - self.owner), rank))


@cache  # blocks are alike
def runs_of(layout: Layout) -> tuple[Run, ...]:
    """A tensor of two or three dimensions as runs. ValueError if its boxes are not the whole of it."""
    held = {rank: box for rank, box in enumerate(layout.boxes) if box.volume}
    if problem := cover_problem(layout.shape, list(dict.fromkeys(held.values()))):
        raise ValueError(f"a tensor of shape {list(layout.shape)} {problem}")
    if len(layout.shape) == 2:
        return (Run(layout.shape, 0, held),)
    edges = {edge for box in held.values() for edge in (box.offsets[0], box.offsets[0] + box.sizes[0])}
    return tuple(run for first, stop in pairwise(sorted(edges)) for run in _between(first, stop, layout.shape, held))


def _between(first: int, stop: int, shape: tuple[int, ...], held: Mapping[int, Box]) -> Iterator[Run]:
    """Matrices of a stack between two neighbouring edges of boxes, shared among the ranks that hold them."""
    here = {r: box for r, box in held.items() if box.offsets[0] <= first < box.offsets[0] + box.sizes[0]}
    count = stop - first
    wanted = max(len(here), -(-count * prod(shape[1:]) // _RUN_ELEMENTS))
    num_runs = min(count, wanted)
    for number in range(num_runs):
        a, b = span(count, num_runs, number)
        boxes = {r: Box((0, *box.offsets[1:]), (b - a, *box.sizes[1:])) for r, box in here.items()}
        yield Run((b - a, *shape[1:]), first + a, boxes)


def buckets(runs: Sequence[tuple[int, Run]], num_ranks: int, cost: Callable[[Sequence[int]], int]) -> list[list[Task]]:
    """Owners for all runs, each given with the number of its tensor, in buckets that bound the memory in flight: at
    least one run a rank, at most 2^26 elements beyond that. The dearest run first goes to the rank with the least to do
    of those that hold a part. The same on all ranks."""
    found: list[list[Task]] = []
    load = [0] * num_ranks
    elements = 0
    for tensor, run in sorted(runs, key=lambda pair: -cost(pair[1].shape)):
        if not found or (elements + prod(run.shape) > _BUCKET_ELEMENTS and len(found[-1]) >= num_ranks):
            found.append([])
            elements = 0
        owner = min(run.held, key=lambda rank: (load[rank], rank))
        load[owner] += cost(run.shape)
        elements += prod(run.shape)
        found[-1].append(Task(tensor, run, owner))
    return found


def on_owners(
    tasks: Sequence[Task],
    parts: Sequence[torch.Tensor | None],
    work: Callable[[list[torch.Tensor]], None],
    like: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> None:
    """Change `parts` in place as `work` changes the whole runs, which it is given on their owners. `parts`: this rank's
    box of each task's run, None where it holds none; of the dtype and device of `like`. Collective over `group`."""
    rank, num_ranks = (group.rank(), group.size()) if group else (0, 1)
    held = [(task, part) for task, part in zip(tasks, parts, strict=True) if part is not None]
    owned = [(task, like.new_empty(task.run.shape)) for task in tasks if task.owner == rank]
    to_owner = _by_rank(num_ranks, ((t.owner, part) for t, part in held if t.source(t.run.held[rank]) == rank))
    of_owner = _by_rank(num_ranks, ((t.owner, part) for t, part in held))
    gathered = _by_rank(num_ranks, ((t.source(box), _cut(x, box)) for t, x in owned for box in t.run.holders))
    returned = _by_rank(num_ranks, ((r, _cut(x, box)) for t, x in owned for r, box in t.run.held.items()))
    shared = any(len(task.run.held) > 1 for task in tasks)
    _exchange(to_owner, gathered, like, group if shared else None, rank)
    work([whole for _, whole in owned])
    _exchange(returned, of_owner, like, group if shared else None, rank)


def _cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))]


def _by_rank(num_ranks: int, pairs: Iterable[tuple[int, torch.Tensor]]) -> list[list[torch.Tensor]]:
    found: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
    for rank, tensor in pairs:
        found[rank].append(tensor)
    return found


def _exchange(
    sent: list[list[torch.Tensor]],
    into: list[list[torch.Tensor]],
    like: torch.Tensor,
    group: dist.ProcessGroup | None,
    rank: int,
) -> None:
    """Copy the tensors for each rank into those that wait there for this one, in order: a rank's own directly, all
    others by one all-to-all. No group: all is this rank's own."""
    for target, source in zip(into[rank], sent[rank], strict=True):
        target.copy_(source)
    if group is None:
        return
    sent, into = ([[] if r == rank else tensors for r, tensors in enumerate(side)] for side in (sent, into))
    outgoing = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in chain(*sent))])
    counts, expected = ([sum(tensor.numel() for tensor in tensors) for tensors in side] for side in (sent, into))
    incoming = like.new_empty(sum(expected))
    dist.all_to_all_single(incoming, outgoing, expected, counts, group=group)
    targets = list(chain(*into))
    for target, arrived in zip(targets, incoming.split([target.numel() for target in targets])):
        target.copy_(arrived.view(target.shape))
