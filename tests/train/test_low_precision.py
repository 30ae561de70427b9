"""Low precision through the real step: scales and draws are of global tensors, so no mesh changes a number."""

from functools import cache

import pytest
import torch

from tests import tiny
from tests.dist import run_ranks
from tests.train.test_step import stepped
from truestep.models.decoder import Decoder
from truestep.recipe.machine import Mesh, Pipeline
from truestep.recipe.numerics import LowPrecision, Numerics

KINDS = {
    "fp8-tensorwise": {"kind": "fp8-tensorwise"},
    "fp8-rowwise": {"kind": "fp8-rowwise"},
    "mxfp8": {"kind": "mxfp8", "weight_gradient": "high"},  # rows of 16 tokens have no blocks of 32
    "nvfp4": {"kind": "nvfp4", "high_last": 0},
}
MESHES = {"tp": (2, {"tp": 2}), "cp": (2, {"cp": 2}), "dp": (2, {}), "pp": (2, {"pp": 2}), "tp 4": (4, {"tp": 4})}
CASES = [("fp8-tensorwise", "cp"), ("fp8-tensorwise", "tp 4"), ("fp8-rowwise", "tp 4"), ("mxfp8", "cp")]
CASES += [("nvfp4", "tp"), ("nvfp4", "dp"), ("nvfp4", "pp")]
ERROR = {"fp8-tensorwise": 0.2, "fp8-rowwise": 0.15, "mxfp8": 0.15, "nvfp4": 0.6}


def _gradients(rank: int, world: int, mesh: dict, low: dict | None) -> tuple[dict[str, torch.Tensor], float, float]:
    with torch.device("meta"):
        model = Decoder(tiny.section(hidden_size=64, intermediate_size=128, head_dim=32))
    training = tiny.state(
        tiny.job(rank, world),
        precision="float64",
        mesh=Mesh(**mesh),
        pipeline=Pipeline(),
        model=model,
        optim={"lr": 1e-2, "clip_norm": 0},
        numerics=Numerics(low_precision=LowPrecision(**low) if low else None),
    )
    groups, batch = training.parallel.groups, tiny.rows()[0]
    return stepped(training, tiny.share(batch, groups.data_rank, groups.data_size, 6), batch.num_targets)


@cache
def _alone(kind: str | None) -> tuple[dict[str, torch.Tensor], float, float]:
    return _gradients(0, 1, {}, KINDS[kind] if kind else None)


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_a_mesh_changes_no_number(kind, mesh):
    world, degrees = MESHES[mesh]
    found, loss, norm = run_ranks(_gradients, world, degrees, KINDS[kind])[0]
    alone, loss_alone, norm_alone = _alone(kind)
    assert (loss, norm) == pytest.approx((loss_alone, norm_alone), rel=1e-12)
    for name, gradient in alone.items():
        assert (found[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_low_and_not_wrong(kind):
    low, high = _alone(kind)[0], _alone(None)[0]
    worst = max(float((low[name] - high[name]).norm() / high[name].norm()) for name in high)
    assert 1e-3 < worst < ERROR[kind]
    assert _alone(kind)[1] == pytest.approx(_alone(None)[1], rel=1e-3)
