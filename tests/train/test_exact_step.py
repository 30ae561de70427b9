"""numerics.reduction = "exact" through the real step: data-parallel and pipeline degrees change no bit."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch

from tests import tiny
from tests.dist import run_ranks
from truestep.models.decoder import Decoder
from truestep.numerics.digest import state_digest
from truestep.recipe.machine import Mesh, Pipeline
from truestep.recipe.numerics import Numerics
from truestep.train.step import train_step

MESHES = {
    "dp_shard 3": (3, {}, {}),
    "dp_replicate 2": (2, {"dp_replicate": 2, "dp_shard": 1}, {}),
    "hsdp": (4, {"dp_replicate": 2}, {}),
    "pp 2": (2, {"pp": 2}, {}),
    "pp 2, dp_shard 2": (4, {"pp": 2}, {"schedule": "zbv"}),
    "pp 2, dp_replicate 2": (4, {"pp": 2, "dp_replicate": 2}, {"schedule": "interleaved-zero-bubble"}),
}


ODD = {"hidden_size": 36, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 50}


def _train(
    rank: int, world: int, mesh: dict, pipe: dict, reduction="exact", tied=True, precision="float32", odd=False
) -> tuple:
    with torch.device("meta"):
        model = Decoder(tiny.section(num_layers=4, tie_embeddings=tied, **(ODD if odd else {})))
    training = tiny.state(
        tiny.job(rank, world),
        precision=precision,
        mesh=Mesh(**mesh),
        pipeline=Pipeline(**pipe),
        model=model,
        optim={"lr": 1e-2, "clip_norm": 0.1},
        numerics=Numerics(reduction=reduction),
    )
    groups, found = training.parallel.groups, []
    for batch in tiny.rows(3):
        mine = tiny.share(batch, groups.data_rank, groups.data_size, 2)
        result = train_step(training, mine, batch.num_targets, [])
        found.append((result.loss, result.grad_norm, result.metrics["nll"], result.clip))
    return found, state_digest(training.parallel.pieces())


@cache
def _alone(reduction: str, tied: bool, precision: str = "float32", odd: bool = False) -> tuple:
    return _train(0, 1, {}, {}, reduction, tied, precision, odd)


@pytest.mark.parametrize("name", MESHES)
def test_degrees_change_no_bit_of_loss_norm_and_weights(name):
    world, mesh, pipe = MESHES[name]
    assert run_ranks(_train, world, mesh, pipe)[0] == _alone("exact", True)


def test_untied_tables_and_fast_sums():
    assert run_ranks(_train, 2, {"pp": 2}, {}, "exact", False)[0] == _alone("exact", False)
    fast = run_ranks(_train, 3, {}, {}, "fast")[0]
    alone = _alone("fast", True)
    assert fast[1] != alone[1]  # what exact sums are for
    for (loss, norm, *_), (loss_alone, norm_alone, *_) in zip(fast[0], alone[0]):
        assert (loss, norm) == pytest.approx((loss_alone, norm_alone), rel=1e-5)
    exact = _alone("exact", True)
    assert [row[0] for row in exact[0]] == pytest.approx([row[0] for row in alone[0]], rel=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["dp_shard 3", "hsdp", "pp 2, dp_shard 2"])
def test_sizes_that_no_vector_divides_and_low_compute(name, precision):
    world, mesh, pipe = MESHES[name]
    assert run_ranks(_train, world, mesh, pipe, "exact", True, precision, True)[0] == _alone(
        "exact", True, precision, True
    )


@pytest.mark.parametrize(("reduction", "asked"), [("exact", True), ("fast", False)])
def test_exact_steps_alone_ask_for_kernels_that_repeat_themselves(reduction, asked, monkeypatch):
    inside = []

    @contextmanager
    def noted(device):
        inside.append(device.type)
        yield

    monkeypatch.setattr("truestep.train.gradients.repeatable", noted)
    _train(0, 1, {}, {}, reduction)
    assert (set(inside) == {"cpu"}) == asked
