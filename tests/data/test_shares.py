"""Microbatches dealt out unevenly: each to one rank, replicas in step, and equal shares as they always were."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truestep.data.shares import Shares


def numbers(shares: Shares, step: int = 0) -> list[list[int]]:
    return [shares.mine(step, rank) for rank in range(shares.replicas * shares.shards)]


def test_equal_shares_are_every_nth_microbatch():
    shares = Shares(2, 3, lambda step: 13)
    assert shares.even and numbers(shares) == [list(range(rank, 13, 6)) for rank in range(6)]
    assert [shares.active(0, rank) for rank in range(6)] == [3, 3, 3, 2, 2, 2]


def test_a_slow_replica_gets_fewer():
    shares = Shares(3, 1, lambda step: 12)
    assert shares.deal(0, [1.0, 3.0, 1.0]) and not shares.even
    assert [len(mine) for mine in numbers(shares)] == [6, 1, 5]
    assert not shares.deal(0, [1.0, 3.1, 1.0])  # the same again
    assert shares.deal(0, [1.0, 1.05, 1.0]) and shares.even


def test_ranks_of_a_replica_always_compute_equally_many():
    shares = Shares(2, 2, lambda step: 10)
    shares.deal(0, [1.0, 4.0])
    assert [shares.active(0, rank) for rank in range(4)] == [4, 4, 1, 1]
    assert shares.rounds(0) == 4 and shares.everywhere(0) == 1


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 40), min_size=2, max_size=2),
    st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
)
def test_every_microbatch_of_every_step_goes_to_one_rank(replicas, shards, counts, pace_s):
    shares = Shares(replicas, shards, counts.__getitem__)
    shares.deal(0, pace_s[:replicas])
    for step, count in enumerate(counts):  # the second step is of another size than the one that was dealt for
        dealt = numbers(shares, step)
        assert sorted(number for mine in dealt for number in mine) == list(range(count))
        for rank, mine in enumerate(dealt):
            assert len(mine) <= shares.active(step, rank) <= shares.rounds(step)
            assert [shares.number(index, rank) for index in range(len(mine))] == mine
            assert shares.active(step, rank) == shares.active(step, rank // shards * shards) >= 1


@pytest.mark.parametrize("pace_s", [[1.0, 1.0], [1.0, 2.0], [5.0, 1.0]])
def test_the_last_to_end_ends_no_later_than_with_equal_shares(pace_s):
    shares = Shares(2, 1, lambda step: 16)
    shares.deal(0, pace_s)
    assert shares.even == (pace_s == [1.0, 1.0]) and max(
        pace * shares.active(0, rank) for rank, pace in enumerate(pace_s)
    ) <= 8 * max(pace_s)
