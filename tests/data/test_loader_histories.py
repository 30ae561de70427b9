"""Histories of the loader alone, without a model: any worlds, shares, ramps, prefetching, resumes and skips give every
row once an epoch, as many microbatches a step whoever computes them, and the same divisor (C44, C45, C47, C49)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.data.test_loader import Steps, ids, row_loader
from truestep.data import loader as loaders
from truestep.data.loader import Loader, Prefetcher
from truestep.data.shares import Shares
from truestep.errors import DataError

ROWS, SIZES = 30, (4, 4, 6, 6, 10, 8, 8, 12, 12, 12, 8, 10, 20)
"""Rows of an epoch, and of the steps: epochs end inside of steps and (behind steps 5 and 13) between them."""
SCHEDULE = Steps(SIZES)

counts = Counter[str]()
"""What histories had in them."""


@dataclass(frozen=True)
class Life:
    """An attempt on replicas x shards ranks with `rows` rows a microbatch and `depth` steps read ahead. It trains for
    `steps` steps and is killed; its last save was `lost` steps before. `paces`: seconds of each replica for a
    microbatch, by which they are dealt out anew. `left_out`: once it has done so many steps, it goes back over so many
    of them and leaves their rows out, which it saves at once."""

    replicas: int
    shards: int
    rows: int
    depth: int
    steps: int
    lost: int
    paces: tuple[float, ...] = ()
    left_out: tuple[int, int] = (0, 0)


@dataclass
class Past:
    """Rows by step, and those left out by the place in the order where they would have been."""

    steps: list[list[int]] = field(default_factory=list)
    left_out: dict[int, list[int]] = field(default_factory=dict)

    def order(self) -> list[int]:
        found: list[int] = []
        for rows in [*self.steps, []]:
            while len(found) in self.left_out:
                found += self.left_out[len(found)]
            found += rows
        return found

    def copy(self) -> "Past":
        return Past(list(self.steps), dict(self.left_out))


def lives(replicas: int) -> st.SearchStrategy[Life]:
    paces = st.tuples(*[st.sampled_from([1.0, 1.0, 1.5, 3.0])] * replicas)
    return st.builds(
        Life,
        st.just(replicas),
        st.integers(1, 2),
        st.sampled_from([1, 2]),
        st.sampled_from([0, 0, 0, 1, 3]),
        st.integers(0, 6),
        st.integers(0, 3),
        st.just(()) | paces,
        st.sampled_from([(0, 0), (1, 1), (2, 1), (2, 2), (4, 2)]),
    )


histories = st.lists(st.integers(1, 4).flatmap(lives), min_size=1, max_size=6)


class Attempt:
    """All ranks of one in this process."""

    def __init__(self, life: Life, state: dict[str, Any], past: Past):
        self.life, self.past = life, past
        self.loader = row_loader(ROWS)
        assert self.loader.restore(state) == sum(SIZES[: len(past.steps)])
        self.shares = Shares(life.replicas, life.shards, lambda step: SIZES[step] // life.rows)
        step, world = len(past.steps), life.replicas * life.shards
        if life.paces and step < len(SIZES):
            self.shares.deal(step, life.paces)
            counts["uneven shares"] += not self.shares.even
        part = (world, life.rows, life.depth, step)
        self.streams = [Prefetcher(self.loader, SCHEDULE, rank, *part, shares=self.shares) for rank in range(world)]

    def train(self) -> None:
        """One step. Every rank's list is as long, every microbatch is on one rank, and all agree on the divisor."""
        parts = [next(stream) for stream in self.streams]
        ((step, divisor),) = {(step, divisor) for step, _, divisor in parts}
        assert step == len(self.past.steps) and len({len(batches) for _, batches, _ in parts}) == 1
        found: dict[int, list[int]] = {}
        for rank, (_, batches, _) in enumerate(parts):
            for index, batch in enumerate(batches):
                if rows := ids([batch]):
                    found[self.shares.number(index, rank)] = rows
        assert sorted(found) == list(range(SIZES[step] // self.life.rows))
        assert sum(batch.num_targets for _, batches, _ in parts for batch in batches) == divisor == SIZES[step]
        self.past.steps.append([row for number in sorted(found) for row in found[number]])

    def leave_out(self, steps: int) -> None:
        """Go back over so many steps, whose rows are not read again."""
        rows = self.past.steps[-steps:]
        before = self.past.steps[:-steps]
        first, stop = sum(map(len, before)), sum(map(len, self.past.steps))
        numbers = self.loader.global_rows(first, stop).tolist()
        for stream in self.streams:
            stream.close()
        self.loader.go_back(self.loader.state(first), (numbers[0], numbers[-1] + 1))
        for stream in self.streams:
            stream.restart(len(before))
        self.past.steps = before
        self.past.left_out[numbers[0]] = [row for each in rows for row in each]
        counts["ranges left out"] += 1

    def state(self) -> dict[str, Any]:
        first, *others = [stream.state() for stream in self.streams]
        assert all(other == first for other in others)
        return first

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


def carry_out(history: list[Life]) -> Past:
    """Live it through, then go on to the end on one rank."""
    saved, past = row_loader(ROWS).state(0), Past()
    for life in [*history, Life(1, 1, 2, 1, len(SIZES), 0)]:
        attempt = Attempt(life, saved, past.copy())
        saves = [(saved, past)]
        for number in range(life.steps):
            at, back = life.left_out
            if back and number == at and len(saves) > back:
                attempt.leave_out(back)
                saves = [(attempt.state(), attempt.past.copy())]
            if len(attempt.past.steps) == len(SIZES):
                break
            attempt.train()
            saves.append((attempt.state(), attempt.past.copy()))
        attempt.close()
        saved, past = saves[max(0, len(saves) - 1 - life.lost)]
        assert saved["next_row"] == sum(SIZES[: len(past.steps)])
    return past


def check(past: Past) -> None:
    """Every epoch is a permutation of all rows, each another one; the last may be cut off."""
    order = past.order()
    assert len(past.steps) == len(SIZES)
    assert len(order) == sum(SIZES) + sum(map(len, past.left_out.values()))
    epochs = [order[at : at + ROWS] for at in range(0, len(order), ROWS)]
    for number, epoch in enumerate(epochs):
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(1, ROWS + 1)), f"epoch {number}: {epoch}"
        assert len(epoch) == ROWS or number == len(epochs) - 1
        assert number == 0 or len(epoch) < 3 or epoch != epochs[0][: len(epoch)], f"epoch {number} is as the first"


_settings = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=100, **_settings)
@given(histories)
def test_c44_c45_c47_c49_every_row_once_an_epoch_in_any_history(history: list[Life]):
    check(carry_out(history))


@pytest.mark.slow
@settings(max_examples=5000, phases=[Phase.generate], **_settings)
@given(histories)
def test_every_row_once_an_epoch_in_5000_histories(history: list[Life]):
    check(carry_out(history))


def test_histories_have_uneven_shares_and_ranges_left_out():
    """Or the others would say nothing of them."""
    counts.clear()

    @settings(max_examples=10, phases=[Phase.generate], derandomize=True, **_settings)
    @given(histories)
    def live(history: list[Life]) -> None:
        carry_out(history)

    live()
    assert counts["uneven shares"] and counts["ranges left out"], counts


def fetched(self: Prefetcher) -> dict[str, Any]:
    """The cursor counts what was read ahead (C44)."""
    steps = SCHEDULE.steps
    return self._loader.state(SCHEDULE.rows(min(self._next_fetch, steps) - 1)[1] if self._next_fetch else 0)


def forgetful(real: Callable) -> Callable:
    """What was left out is not in the state."""
    return lambda self, next_row: real(self, next_row) | {"skipped": []}


def first_order(real: Callable) -> Callable:
    """Every epoch in the order of the first (C45)."""
    return lambda n, seed, epoch, stream=0: real(n, seed, 0, stream)


def by_padding(real: Callable) -> Callable:
    """The divisor counts rows that are padding on some worlds: what each rank has, times the ranks (C49)."""

    def load(self: Prefetcher, step: int) -> Any:
        batches, _ = real(self, step)
        return batches, sum(map(lambda batch: batch.num_targets, batches)) * self._part[1]

    return load


def per_rank(real: Callable) -> Callable:
    """Microbatches in blocks by rank, the last ranks' cut off (C47)."""

    def microbatches(loader: Loader, start: int, stop: int, rank: int, world: int, rows: int) -> Any:
        count = -(-(stop - start) // (rows * world))
        last = (stop - start) // rows - 1
        mine = [min(rank * count + i, last) for i in range(count)]
        return loaders.chosen(loader, start, stop, rows, mine, count)

    return microbatches


MUTATIONS = {
    "the cursor counts what was fetched": (Prefetcher, "state", lambda real: fetched),
    "what is left out is forgotten": (Loader, "state", forgetful),
    "what is left out is ignored": (Loader, "go_back", lambda real: lambda self, state, left: self.restore(state)),
    "every epoch in one order": (loaders, "Permutation", first_order),
    "the divisor of another world": (Prefetcher, "_load", by_padding),
    "rows by rank": (loaders, "microbatches", per_rank),
    "no padding": (Shares, "rounds", lambda real: lambda self, step: self.everywhere(step)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_loader_fails(name: str, monkeypatch: pytest.MonkeyPatch):
    """Each of these faults, which others have had, is found."""
    owner, attribute, broken = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, broken(vars(owner)[attribute]))

    @settings(max_examples=200, phases=[Phase.generate], derandomize=True, **_settings)
    @given(histories)
    def any_history(history: list[Life]) -> None:
        check(carry_out(history))

    with pytest.raises((AssertionError, ValueError, DataError)):
        any_history()
