"""Loader: one order of rows whatever the world size, prefetching, restarts and skips; every row exactly once."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.fakes import memory_store, numbered, sparse_store
from truestep.data.loader import Corpus, Loader, Prefetcher, evaluation_batches, microbatches
from truestep.data.order import Permutation
from truestep.data.packing import open_packing
from truestep.errors import DataError
from truestep.numerics.batch import IGNORE, Batch


@dataclass(frozen=True)
class Steps:
    """A schedule from the sizes of its steps."""

    sizes: tuple[int, ...]

    @property
    def steps(self) -> int:
        return len(self.sizes)

    def rows(self, step: int) -> tuple[int, int]:
        return sum(self.sizes[:step]), sum(self.sizes[: step + 1])


def row_corpus(num_rows: int, first: int = 1, **options: Any) -> Corpus:
    """A corpus whose row i (context 1) holds the one token first + i."""
    return Corpus(numbered([num_rows + 1], first), **options)


def row_loader(num_rows: int = 24, **options: Any) -> Loader:
    return Loader([row_corpus(num_rows)], 1, 0, **options)


def ids(batches: list[Batch]) -> list[int]:
    """The row tokens of microbatches, padding left out."""
    return [int(t) for batch in batches for t in batch.tokens_BT[batch.documents_BT >= 0]]


def global_batch(loader: Loader, start: int, stop: int, world: int, rows: int) -> list[int]:
    """The row tokens of a step, gathered from all ranks in the order of microbatches."""
    ranks = [microbatches(loader, start, stop, rank, world, rows) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch.tokens_BT.shape == (rows, loader.context) for batches in ranks for batch in batches)
    return [i for j in range(len(ranks[0])) for rank in range(world) for i in ids([ranks[rank][j]])]


def order(loader: Loader, stop: int, start: int = 0) -> list[int]:
    return loader.rows(loader.global_rows(start, stop)).tokens_BT[:, 0].tolist()


def same(a: Batch, b: Batch) -> bool:
    return all(
        torch.equal(getattr(a, f), getattr(b, f)) for f in ("tokens_BT", "labels_BT", "positions_BT", "documents_BT")
    )


def test_c47_the_order_does_not_depend_on_the_world_size():
    p = order(row_loader(), 24)
    assert sorted(p) == list(range(1, 25))
    for worlds in [(2, 2, 3, 3), (1, 1, 1, 1), (6, 6, 6, 6), (1, 2, 3, 6), (4, 4, 4, 4)]:
        loader, consumed = row_loader(), 0
        for step, world in enumerate(worlds):
            assert global_batch(loader, consumed, consumed + 6, world, 1) == p[6 * step : 6 * step + 6]
            consumed += 6
            loader, state = row_loader(), loader.state(consumed)
            assert loader.restore(state) == consumed == 6 * (step + 1)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_padding_evens_out_the_ranks_and_adds_no_target(world: int, rows: int):
    loader = row_loader()
    assert global_batch(loader, 6, 18, world, rows) == order(loader, 18, 6)
    everything = [b for rank in range(world) for b in microbatches(loader, 6, 18, rank, world, rows)]
    assert sum(b.num_targets for b in everything) == loader.targets(loader.global_rows(6, 18)) == 12


def test_a_microbatch_that_does_not_divide_is_refused():
    with pytest.raises(DataError, match="a step of 10 rows is not a whole number of microbatches of 4 rows"):
        microbatches(row_loader(), 0, 10, 0, 1, 4)
    with pytest.raises(DataError, match="a step of 10 rows is not a whole number"):
        Prefetcher(row_loader(), Steps((8, 10)), 0, 1, 4, depth=2)


def test_c05_a_skip_is_applied_once_and_before_the_split():
    """16 examples over 2 ranks, one left out on each: 7 and 7, disjoint, with the owners they have without a skip."""
    whole, skipping = row_loader(16), row_loader(16, skip=[(0, 2)])
    owners = [set(ids(microbatches(whole, 0, 16, rank, 2, 1))) for rank in range(2)]
    rest = [ids(microbatches(skipping, 0, 14, rank, 2, 1)) for rank in range(2)]
    assert [len(r) for r in rest] == [7, 7]
    assert not set(rest[0]) & set(rest[1])
    first = order(whole, 2)
    assert [set(r) for r in rest] == [owners[0] - {first[0]}, owners[1] - {first[1]}]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_c44_the_state_counts_what_was_used(depth: int):
    schedule = Steps((4,) * 6)
    p = order(row_loader(), 24)
    with Prefetcher(row_loader(), schedule, 0, 1, 4, depth) as stream:
        used = [ids(next(stream)[1]) for _ in range(2)]
        state = stream.state()
    assert state["next_row"] == 8
    loader = row_loader()
    assert loader.restore(state) == 8
    with Prefetcher(loader, schedule, 0, 1, 4, depth, start_step=2) as stream:
        assert stream.state() == state  # saved again at once
    loader = row_loader()
    assert loader.restore(state) == 8
    with Prefetcher(loader, schedule, 0, 1, 4, depth, start_step=2) as stream:
        used += [ids(batches) for _, batches, _ in stream]
    assert used[2] == p[8:12]
    assert [i for step in used for i in step] == p and sorted(p) == list(range(1, 25))


def test_c45_the_order_of_an_epoch_is_its_own():
    p = order(row_loader(4), 12)
    for epoch in range(3):
        expected = Permutation(4, 0, epoch)[np.arange(4)] + 1
        assert p[4 * epoch : 4 * epoch + 4] == expected.tolist()
    resumed = row_loader(4)
    assert resumed.restore(row_loader(4).state(5)) == 5
    assert order(resumed, 8, 5) == p[5:8]


def test_c45_a_checkpoint_at_the_end_of_an_epoch_goes_on():
    schedule, loader = Steps((2,) * 6), row_loader(6)
    with Prefetcher(loader, schedule, 0, 1, 2, depth=1) as stream:
        for _ in range(3):
            next(stream)
        state = stream.state()
    assert state["next_row"] == 6
    again = row_loader(6)
    again.restore(state)
    with Prefetcher(again, schedule, 0, 1, 2, depth=1, start_step=3) as stream:
        rest = list(stream)
        assert stream.state()["next_row"] == 12
    assert [step for step, _, _ in rest] == [3, 4, 5]
    assert sorted(i for _, batches, _ in rest for i in ids(batches)) == list(range(1, 7))


history = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 3)),
        st.tuples(st.just("resume"), st.sampled_from([1, 2, 3, 4, 6])),
        st.tuples(st.just("roll back"), st.integers(1, 3)),
        st.tuples(st.just("leave out"), st.integers(1, 4), st.integers(1, 3)),
        st.tuples(st.just("skip"), st.integers(0, 12), st.integers(1, 15)),
    ),
    max_size=14,
)


@settings(deadline=None)
@given(history, st.sampled_from([0, 1, 4]), st.lists(st.sampled_from([6, 12, 18]), min_size=60, max_size=60))
def test_any_history_sees_every_row_once_in_order(events: list[tuple], depth: int, sizes: list[int]):
    """Train, save, resume at another world size, roll back (to what was saved, leaving out the last rows), skip: the
    rows trained on are the global order less what was skipped, each once (C44, C47)."""
    schedule, num_rows = Steps(tuple(sizes)), 500
    whole = order(row_loader(num_rows), 1000)
    loader, world, step = row_loader(num_rows), 1, 0
    trained: list[list[int]] = []
    skipped: set[int] = set()
    saved = {0: loader.state(0)}
    for kind, *numbers in events:
        if kind == "train":
            streams = [Prefetcher(loader, schedule, rank, world, 2, depth, step) for rank in range(world)]
            for _ in range(numbers[0]):
                parts = [next(stream) for stream in streams]
                assert {(s, n) for s, _, n in parts} == {(step, sizes[step])}
                trained.append(
                    [i for j in range(len(parts[0][1])) for _, batches, _ in parts for i in ids([batches[j]])]
                )
                step += 1
                saved[step] = loader.state(schedule.rows(step)[0])
            states = [stream.state() for stream in streams]
            assert all(state == loader.state(schedule.rows(step)[0]) for state in states)
            for stream in streams:
                stream.close()
        elif kind == "roll back":
            step = max(0, step - numbers[0])
            del trained[step:]
        elif kind == "leave out":
            back, count = min(step, numbers[0]), min(step, numbers[0], numbers[1])
            if count:
                first, last = schedule.rows(step - count)[0], schedule.rows(step)[0]
                bad = loader.global_rows(first, last)
                step -= back
                assert loader.go_back(saved[step], (int(bad[0]), int(bad[-1]) + 1)) == schedule.rows(step)[0]
                del trained[step:]
                skipped |= set(range(bad[0], bad[-1] + 1))
        elif kind == "skip":
            next_row = schedule.rows(step)[0]
            start = int(loader.global_rows(next_row, next_row + 1)[0]) + numbers[0]
            loader.skip(start, start + numbers[1], next_row)
            skipped |= set(range(start, start + numbers[1]))
        else:
            world, state = numbers[0], loader.state(schedule.rows(step)[0])
            loader = row_loader(num_rows)
            assert schedule.rows(step)[0] == loader.restore(state)
    done = [i for batch in trained for i in batch]
    assert done == [token for row, token in enumerate(whole) if row not in skipped][: len(done)]


@pytest.mark.parametrize("depth", [0, 3])
def test_c44_c45_rows_left_out_over_the_edge_of_an_epoch(depth: int):
    """Rows 4 to 7 of epochs of 6: a state at the edge goes on behind them, in the order of that epoch."""
    whole, loader, schedule = order(row_loader(6), 24), row_loader(6), Steps((2,) * 8)
    with Prefetcher(loader, schedule, 0, 1, 2, depth) as stream:
        first = [ids(next(stream)[1]) for _ in range(4)]
        assert first == [whole[2 * step : 2 * step + 2] for step in range(4)]
        stream.close()
        next_row = loader.go_back(row_loader(6).state(4), (4, 8))
        stream.restart(2)
        used = [ids(next(stream)[1])]
        state = stream.state()
        used += [ids(batches) for _, batches, _ in stream]
    assert next_row == 4 and [i for step in used for i in step] == whole[8:20]
    resumed = row_loader(6)
    assert resumed.restore(state) == 6 and state["skipped"] == [[4, 8]]
    with Prefetcher(resumed, schedule, 0, 1, 2, depth, start_step=3) as stream:
        assert stream.state() == state
        assert [ids(batches) for _, batches, _ in stream] == used[1:]


def test_going_back_keeps_what_was_left_out_and_takes_ranges_that_meet_as_one():
    loader = row_loader()
    assert loader.go_back(loader.state(4), (6, 9)) == 4
    assert loader.go_back({**loader.state(2), "skipped": []}, (9, 11)) == 2
    assert loader.skipped == [(6, 11)]
    assert loader.go_back({**loader.state(6), "skipped": [[6, 9]]}) == 6  # of (6, 11), rows 9 and 10 lie ahead
    assert loader.skipped == [(6, 11)]
    assert loader.go_back({**loader.state(8), "skipped": [[6, 9]]}) == 8  # these two were trained on by then
    assert loader.skipped == [(6, 9)]


def test_rows_that_no_data_is_left_for_are_said_at_once():
    corpus = row_corpus(24, max_epochs=1.0)
    loader = Loader([corpus], 1, 0)
    with Prefetcher(loader, Steps((4,) * 6), 0, 1, 4, depth=1) as stream:
        stream.close()
        loader.go_back(loader.state(0), (4, 8))
        with pytest.raises(DataError, match="the stage needs 24 rows of 1 tokens, its data gives 20"):
            stream.restart(0)


def test_what_was_trained_on_cannot_be_skipped():
    loader = row_loader()
    with pytest.raises(DataError, match="rows 3 to 5 cannot be skipped: row 4 of the run is next"):
        loader.skip(3, 5, next_row=4)
    loader.skip(4, 5, next_row=4)
    with pytest.raises(DataError, match="rows 4 to 6 cannot be skipped"):
        loader.skip(4, 6, next_row=4)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_the_stream_is_the_same_at_any_depth(depth: int):
    loader, schedule = row_loader(), Steps((4, 8, 12, 4))
    with Prefetcher(loader, schedule, 1, 2, 2, depth) as stream:
        found = list(stream)
    assert [step for step, _, _ in found] == [0, 1, 2, 3]
    for step, batches, num_targets in found:
        expected = microbatches(loader, *schedule.rows(step), 1, 2, 2)
        assert len(batches) == len(expected) and all(map(same, batches, expected))
        assert num_targets == schedule.sizes[step]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_an_error_in_the_thread_reaches_the_consumer_each_time(depth: int):
    loader = row_loader(8)
    find: Callable = loader.rows

    def fails_late(rows: np.ndarray) -> Batch:
        if rows[0] >= 4:
            raise DataError("block 7 is damaged")
        return find(rows)

    loader.rows = fails_late  # type: ignore[method-assign]
    with Prefetcher(loader, Steps((4, 4, 4)), 0, 1, 4, depth) as stream:
        next(stream)
        for _ in range(2):
            with pytest.raises(DataError, match="block 7 is damaged"):
                next(stream)
        assert stream.state()["next_row"] == 4


def test_closing_ends_the_thread():
    before = threading.active_count()
    stream = Prefetcher(row_loader(), Steps((1,) * 24), 0, 1, 1, depth=4)
    next(stream)
    stream.close()
    assert threading.active_count() == before


def mixed(caps: tuple[float | None, float | None], seed: int = 0) -> Loader:
    corpora = [row_corpus(40, 1, weight=3.0, max_epochs=caps[0]), row_corpus(10, 1001, weight=1.0, max_epochs=caps[1])]
    return Loader(corpora, 1, seed)


def test_mixtures_draw_each_corpus_in_its_own_order():
    loader = mixed((None, None))
    rows = np.array(order(loader, 80))
    first, second = rows[rows < 1000], rows[rows > 1000]
    assert (len(first), len(second)) == (60, 20)
    assert sorted(first[:40]) == list(range(1, 41)) and len(set(first[40:])) == 20
    for epoch in range(2):
        expected = Permutation(10, 0, epoch, 1)[np.arange(10)] + 1001
        assert second[10 * epoch : 10 * epoch + 10].tolist() == expected.tolist()
    assert loader.num_rows is None and loader.num_rows_per_epoch == [40, 10]
    shuffled = np.random.default_rng(0).permutation(80)
    assert loader.rows(shuffled).tokens_BT[:, 0].tolist() == rows[shuffled].tolist()


def test_caps_end_the_mixture_and_the_schedule_is_checked_at_the_door():
    loader = mixed((1.5, 0.3))
    assert loader.num_rows == 63
    rows = np.array(order(loader, 63))
    assert [(rows < 1000).sum(), (rows > 1000).sum()] == [60, 3]
    loader.skip(10, 13, next_row=5)
    assert loader.num_rows == 60
    with pytest.raises(DataError, match="the stage needs 61 rows of 1 tokens, its data gives 60 under max_epochs"):
        Prefetcher(loader, Steps((1,) * 61), 0, 1, 1, depth=0)
    Prefetcher(loader, Steps((1,) * 60), 0, 1, 1, depth=0)
    with pytest.raises(DataError, match=r"max_epochs 0\.01 of 10 rows is no row"):
        mixed((None, 0.01))


def test_another_recipe_of_data_is_refused():
    base = mixed((None, None))
    store = numbered([41])
    others = [
        mixed((None, 2.0)),
        mixed((None, None), seed=1),
        row_loader(),
        Loader([Corpus(store)], 2, 0),
        Loader([Corpus(store)], 1, 0, mask_documents=False),
        Loader([Corpus(store, weight=2.0)], 1, 0),
    ]
    assert len({loader.fingerprint for loader in [base, *others]}) == 7
    for loader in others:
        with pytest.raises(DataError, match="the checkpoint was made on other data"):
            loader.restore(base.state(3))
    mixed((None, None)).check(base.state(3))


def test_masking_rows_and_packing_go_through(tmp_path: Path):
    """What the loader gives is what the packing gives, in the permuted order, for both policies."""
    store = numbered([5, 9, 3, 3, 8, 1, 6, 12])
    for kind in ("split", "best-fit"):
        corpus = Corpus(store, packing=kind, too_long="split", index_folder=tmp_path)
        loader = Loader([corpus], 4, 7)
        packing = open_packing(kind, store, 4, True, "split", tmp_path)
        indices = Permutation(packing.num_rows, 7, 0)[np.arange(packing.num_rows)]
        batch, rows = loader.rows(np.arange(packing.num_rows)), packing.rows(indices)
        assert batch.labels_BT.tolist() == rows.labels_BT.tolist()
        assert batch.documents_BT.tolist() == rows.documents_BT.tolist()
        assert batch.num_targets == loader.targets(np.arange(packing.num_rows))
        assert [f.dtype for f in (batch.tokens_BT, batch.labels_BT, batch.positions_BT)] == [torch.int64] * 3
        assert batch.documents_BT.dtype == torch.int32


@pytest.mark.parametrize("world, rows", [(1, 1), (1, 4), (2, 3), (3, 2), (4, 16)])
def test_evaluation_sees_every_row_once(world: int, rows: int):
    corpus = Corpus(memory_store([range(1, 8), range(8, 24)]))
    ranks = [list(evaluation_batches(corpus, 2, True, rank, world, rows)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    found = [b for j in range(len(ranks[0])) for rank in range(world) for b in [ranks[rank][j]]]
    assert all(b.tokens_BT.shape == (rows, 2) for b in found)
    labels = [int(label) for b in found for label in b.labels_BT[b.labels_BT != IGNORE]]
    assert labels == [i for i in range(2, 24) if i != 8]


def test_evaluation_of_some_rows_takes_them_evenly():
    corpus = row_corpus(100)
    assert ids(list(evaluation_batches(corpus, 1, True, 0, 1, 3, limit=4))) == [1, 26, 51, 76]
    assert len(ids(list(evaluation_batches(corpus, 1, True, 0, 1, 3, limit=400)))) == 100


def test_rows_of_a_huge_store_come_at_once(tmp_path: Path):
    store = sparse_store(tmp_path / "s", np.arange(0, 5_000_000_001, 50_000))
    loader = Loader([Corpus(store)], 4096, 0)
    batch = loader.rows(np.arange(10**6, 10**6 + 8))
    assert batch.tokens_BT.shape == (8, 4096)
    assert batch.num_targets == loader.targets(np.arange(10**6, 10**6 + 8))


def test_no_corpus_is_refused():
    with pytest.raises(DataError, match="needs at least one corpus"):
        Loader([], 1, 0)
