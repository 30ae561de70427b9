"""Matrix products in one with the collectives of the tensor axis, by what the operators fall back to on a CPU."""

import pytest
import torch

from tests import tiny
from tests.dist import run_ranks
from tests.train.test_step import assert_same, gradients_of
from truestep.models.decoder import Decoder
from truestep.numerics import fused
from truestep.numerics.axis import Axis
from truestep.recipe.machine import Mesh
from truestep.train import build
from truestep.train.step import train_step

BIASES = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
SECTIONS = {
    "grouped heads": {},
    "fewer key heads than ranks, biases": {"num_kv_heads": 1, "qk_norm": "full", **BIASES},
    "latent attention, experts": {
        "mla": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 6},
        "moe": {"num_experts": 4, "top_k": 2, "expert_size": 12, "shared_size": 16},
        "num_kv_heads": 4,
    },
}
RECOMPUTED = {"activation_checkpointing": "selective"}


def decoder(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(tiny.section(**SECTIONS[name]))


def _fused(rank, world, name, options):
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "require_gpu", lambda machine, device: None)
        for one in ("_gather_matmul", "_matmul_scatter"):
            original = getattr(fused, one)
            patch.setattr(fused, one, lambda *args, one=one, original=original: calls.append(one) or original(*args))
        training = tiny.state(
            tiny.job(rank, world),
            precision="float64",
            mesh=Mesh(dp_shard=1, tp=2),
            async_tp=True,
            optim={"lr": 1e-2, "clip_norm": 0},
            model=decoder(name),
            **options,
        )
        kept, zero = {}, training.parallel.zero_grad
        training.parallel.zero_grad = lambda: (kept.update(tiny.whole_gradients(training)), zero())
        (batch,) = tiny.rows()
        result = train_step(training, [batch], batch.num_targets, [])
    return kept, result.loss, calls


@pytest.mark.parametrize("name, options", [*((name, {}) for name in SECTIONS), ("grouped heads", RECOMPUTED)])
def test_equals_one_process(name, options):
    grads, loss, _ = gradients_of(tiny.rows(), model=decoder(name))
    for found, its_loss, calls in run_ranks(_fused, 2, name, options):
        assert_same(grads, found, 1e-10)
        assert its_loss == pytest.approx(loss, rel=1e-12)
        layers, maps = 2, 1 if "latent" in name else 2  # of latent attention only what follows the core
        if not options:
            assert calls.count("_gather_matmul") == layers * (maps + 2)
            assert calls.count("_matmul_scatter") == layers * (maps + 2)


def _lower(rank, world):
    """Under autocast and with float32 weights, a gathered product and a scattered one beside the plain ones."""
    axis = Axis("tp", world, rank, torch.distributed.group.WORLD)
    random = torch.Generator().manual_seed(rank)
    x, weight, back = (torch.randn(shape, generator=random).requires_grad_() for shape in ((2, 3, 8), (6, 8), (8, 6)))
    results = []
    for fuse in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if fuse:
                (y,) = fused.gathered_products(x, [weight], axis, 1)
                z = fused.product_scattered(y, back, axis, 1)
            else:
                y = torch.nn.functional.linear(axis.gather(x, 1), weight)
                z = axis.scatter_sum(torch.nn.functional.linear(y, back), 1)
        grads = torch.autograd.grad(z.float().square().sum(), (x, weight, back))
        results.append((z.detach(), *grads))
    return results


def test_in_the_precision_of_autocast():
    for plain, one in run_ranks(_lower, 2):
        for a, b in zip(plain, one):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.05)
