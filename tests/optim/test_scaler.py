"""Loss scaling: skipped steps are the same on all ranks and do not move the schedule."""

import torch
import torch.distributed as dist

from truestep.numerics.axis import Axis
from truestep.numerics.pieces import Piece
from truestep.optim.scaler import LossScaler
from truestep.optim.schedule import factor
from truestep.parallel.reduce import global_norm
from truestep.recipe.stage import Schedule


def test_scale_halves_on_overflow_and_doubles_after_good_steps():
    scaler = LossScaler(scale=8.0, growth_interval=3)
    history = []
    for finite in (True, False, True, True, True, True, True, True):
        scaler.update(finite)
        history.append(scaler.scale)
    assert history == [8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


def test_unscaling_is_exact():
    grads = [torch.randn(5), torch.randn(3, dtype=torch.float64)]
    scaled = [g * 2.0**16 for g in grads]
    LossScaler().unscale_(scaled)
    assert all(torch.equal(a, b) for a, b in zip(scaled, grads))


def test_state_comes_back():
    scaler = LossScaler(scale=8.0, growth_interval=3)
    for finite in (False, True, True):
        scaler.update(finite)
    again = LossScaler(growth_interval=3)
    again.load_state(scaler.state())
    for one in (scaler, again):
        one.update(True)
    assert again.scale == scaler.scale == 8.0 and again.state() == scaler.state()


def test_off_changes_nothing():
    scaler, grads = LossScaler.off(), [torch.tensor([3.0])]
    scaler.unscale_(grads)
    scaler.update(False)
    assert scaler.scale == 1.0 and grads[0].item() == 3.0


def _ten_tries(rank: int, world: int) -> tuple[int, float, list[bool]]:
    axis = Axis("world", world, rank, dist.group.WORLD)
    scaler, taken, skipped = LossScaler(), 0, []
    for attempt in range(10):
        # The overflow is in one rank's shard only.
        bad = attempt in (2, 3, 7) and rank == attempt % world
        part = torch.tensor([float("inf") if bad else 1.0])
        finite = bool(global_norm([Piece(part, (world,), (rank,))], axis, part.device).isfinite())
        scaler.update(finite)
        skipped.append(not finite)
        taken += finite
    return taken, scaler.scale, skipped


def test_c23_overflow_skips_alike_on_all_ranks_and_the_schedule_waits(pool):
    results = pool.run(_ten_tries, 2)
    assert results[0] == results[1]
    taken, scale, skipped = results[0]
    assert taken == 7 and scale == 2.0**13 and skipped == [i in (2, 3, 7) for i in range(10)]
    assert factor(Schedule(kind="linear", warmup=10), taken, 100) == 0.8  # the eighth step of warm-up comes next
