"""The pool of ranks: results come home, failures too, and neither a failed nor a stuck task is its end."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError


def _sum(rank, world, start):
    x = torch.tensor([float(rank + start)])
    dist.all_reduce(x)
    return x.item(), os.getpid()


def _fails(rank, world, guilty):
    if rank in guilty:
        raise ValueError(f"no good at {rank}")
    dist.barrier()


def _dies(rank, world):
    os._exit(3) if rank == 1 else dist.barrier()


def _hangs(rank, world):
    time.sleep(60 if rank == 1 else 0)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_results_come_in_rank_order_and_processes_live_on(pool, world):
    pids = {tuple(pid for _, pid in pool.run(_sum, world, start)) for start in range(3)}
    assert pids == {tuple(pool.pids[:world])}
    assert pool.run(_sum, world, 1)[0][0] == world * (world + 1) / 2


def test_a_failure_comes_home_with_rank_and_traceback_and_the_pool_goes_on(pool):
    with pytest.raises(RankError, match=r"rank 1 of 2: Traceback(.|\n)*in _fails(.|\n)*ValueError: no good at 1"):
        pool.run(_fails, 2, [1])
    assert pool.run(_sum, 2, 0)[0][0] == 1.0


def test_where_all_ranks_fail_alike_no_process_is_lost(pool):
    before = pool.pids
    with pytest.raises(RankError, match="no good at"):
        pool.run(_fails, 4, [0, 1, 2, 3])
    assert pool.pids == before


def test_a_rank_that_dies_is_replaced():
    with Pool(2) as pool:
        before = pool.pids
        with pytest.raises(RankError, match=r"rank 1 of 2 died without a word|Connection closed by peer"):
            pool.run(_dies, 2)
        assert pool.pids[1] != before[1]
        assert pool.run(_sum, 2, 0)[1][0] == 1.0


def test_a_stuck_rank_is_killed_in_time_and_replaced():
    with Pool(2) as pool:
        before, began = pool.pids, time.monotonic()
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 still ran after 1.0 s"):
            pool.run(_hangs, 2, timeout_s=1.0)
        assert time.monotonic() - began < 5
        assert pool.pids[0] == before[0] and pool.pids[1] != before[1]
        assert pool.run(_sum, 2, 0)[1][0] == 1.0


def test_the_ranks_end_with_the_pool():
    with Pool(1) as pool:
        (pid,) = pool.pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
