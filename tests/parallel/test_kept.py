"""Bytes kept for the backward pass: what is counted, once, and what is not."""

import pytest
import torch
from torch import nn

from tests import tiny
from tests.dist import run_ranks
from truestep.parallel.kept import Kept
from truestep.recipe.machine import Mesh, Pipeline
from truestep.train.step import train_step


def counted(model: nn.Module, x: torch.Tensor) -> int:
    kept = Kept()
    with kept.counting(0, model):
        y = model(x)
    y.sum().backward()
    return kept.total


def test_inputs_of_maps_count_and_weights_do_not():
    x = torch.randn(8, 64)
    assert counted(nn.Linear(64, 16), x) == 8 * 64 * 4
    assert counted(nn.Sequential(nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 4)), x) == 8 * (64 + 16 + 16) * 4


def test_a_storage_counts_once_and_what_autograd_dropped_does_not():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 4), nn.Linear(32, 4)

        def forward(self, x):
            self.b(torch.randn(1000, 32)).sum()  # its graph is gone when forward ends
            return self.a(x) + self.b(x[:, :32]) + self.a(x.view(2, 4, 64)).view(8, 4)

    assert counted(Twice(), torch.randn(8, 64)) == 8 * 64 * 4


def has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore


def test_it_counts_once_and_leaves_no_hook():
    kept, model = Kept(), nn.Linear(64, 16)
    for rows in (8, 100):
        with kept.counting(0, model):
            model(torch.randn(rows, 64)).sum().backward()
            assert has_hooks() == (rows == 8)
    assert not has_hooks()
    assert kept.by_part == {0: 0}, "after the backward pass nothing is kept"


def _kept(rank: int, world: int, mesh: Mesh, reshards: bool) -> dict[int, int]:
    training = tiny.state(tiny.job(rank, world), mesh=mesh, pipeline=Pipeline(), reshard_after_forward=reshards)
    batch, groups = tiny.rows()[0], training.parallel.groups
    train_step(training, tiny.share(batch, groups.data_rank, groups.data_size, 3), batch.num_targets, [])
    return training.parallel.kept.by_part


@pytest.mark.parametrize("reshards", [False, True])
def test_gathered_weights_do_not_count(reshards):
    (alone,) = _kept(0, 1, Mesh(), True).values()
    for found in run_ranks(_kept, 2, Mesh(), reshards):
        assert found == {0: alone}


def test_every_part_of_a_pipeline_counts():
    alone = _kept(0, 1, Mesh(), True)[0]
    first, second = run_ranks(_kept, 2, Mesh(pp=2), True)
    assert list(first) == [0] and list(second) == [1]
    assert first[0] > 0 and second[1] > 0 and first[0] + second[1] == pytest.approx(alone, rel=0.2)
