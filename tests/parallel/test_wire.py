"""What collectives delivered: a changed bit shows, also if another one seems to make up for it; rounding does not."""

import pytest
import torch
import torch.distributed as dist

from truestep.numerics.axis import all_gather, reduce_scatter
from truestep.numerics.exact_collectives import Trail, exchange_rows, sum_integers_
from truestep.parallel.wire import Wire
from truestep.sentinel.inject import flip_bit_


def _exact(rank, world, changes):
    """Residual over all ranks of two exchanges and two sums; on rank 1 the first word is off by each of `changes`."""
    group, trail, changes = dist.group.WORLD, Trail(), iter(changes)
    trail.strike = lambda x: x.view(-1)[:1].add_(next(changes)) if rank == 1 else None
    residual = torch.zeros((), dtype=torch.int64)
    for _ in range(2):
        residual += exchange_rows(torch.arange(4 * world).view(world, 4) + rank, group, trail)[1]
    for _ in range(2):
        residual += sum_integers_(torch.arange(5) * rank, group, trail)
    dist.all_reduce(residual)
    return int(residual), trail.broken()


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ((0, 0, 0, 0), []),
        ((1, 0, 0, 0), [(0, 1)]),
        ((1, -1, 0, 0), [(0, 1)]),
        ((0, 0, 1, -1), [(1, 1)]),
        ((0, 7, 0, -2), [(0, 1), (1, 1)]),
    ],
)
def test_exact_collectives_do_not_make_up_for_each_other(pool, changes, pairs):
    for residual, broken in pool.run(_exact, 3, changes):
        assert bool(residual) == bool(pairs) and broken == pairs


def _native(rank, world, kind, dtype, element, bit):
    group, wire = dist.group.WORLD, Wire()
    wire.begin(armed=True)
    if rank == 1 and bit is not None:
        wire.strike = lambda x: flip_bit_(x, element, bit)
    random = torch.Generator().manual_seed(rank)
    given = torch.randn(world * 50, generator=random).mul_(10.0 ** (torch.arange(world * 50) % 6 - 3)).to(dtype)
    if kind == "gather":
        out = given.new_empty(world * len(given))
        all_gather(out, given, group=group)
        wire.gathered(out, given, group)
    elif kind == "scatter":
        out = given.new_empty(50)
        reduce_scatter(out, given, group=group)
        wire.scattered(out, given, group)
    else:
        out = given.clone()
        dist.all_reduce(out, group=group)
        wire.summed(out, given, group)
    (found,) = wire.delivered()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gather", "scatter", "sum"])
def test_sound_collectives_are_sound(pool, kind, dtype):
    if dtype is torch.bfloat16 and kind != "gather":
        return  # sums are of fp32 at least
    for found in pool.run(_native, 3, kind, dtype, 0, None):
        assert found.sound and list(found.ranks) == [0, 1, 2]


@pytest.mark.parametrize("bit", [0, 9, 30])
def test_any_bit_of_a_gather_shows(pool, bit):
    for found in pool.run(_native, 3, "gather", torch.float32, 310, bit):  # of what rank 2 gave
        assert found.said[2][0] == found.said[2][2] != found.said[2][1]


def _changed_for_all(rank, world):
    """An all-gather that delivers other bits of what rank 2 gave to everybody, itself included."""
    wire, given = Wire(), torch.arange(4.0)
    wire.begin(armed=True)
    wire.strike = lambda x: flip_bit_(x, 8, 30)
    out = given.new_empty(world * 4)
    all_gather(out, given, group=dist.group.WORLD)
    wire.gathered(out, given, dist.group.WORLD)
    return wire.delivered()


def test_who_gave_the_bits_knows_them_where_all_got_others(pool):
    for (found,) in pool.run(_changed_for_all, 3):
        assert not found.sound
        assert found.said[2][0] == found.said[2][1] != found.said[2][2]


@pytest.mark.parametrize("kind", ["scatter", "sum"])
def test_a_sum_that_rounding_does_not_explain(pool, kind):
    for bit in (4, 12, 22, 27, 31):
        for found in pool.run(_native, 3, kind, torch.float32, 20, bit):
            assert found.wrong == [0, 1, 0] and found.alike == (kind == "sum")
