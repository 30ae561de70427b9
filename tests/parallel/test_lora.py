"""Low-rank adapters on every axis of the mesh against one process: gradients, loss, weights after steps of AdamW; draws
of dropout; what the base weights are for it all: nothing that changes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.parallel import oracle
from tests.parallel.compositions import Composition, parse
from tests.parallel.harness import PATIENCE_S, Found, captured, errors, share, start, whole, worst
from truestep.numerics.low_rank import is_adapter
from truestep.numerics.pieces import Piece
from truestep.train import build
from truestep.train.adapt import adapt
from truestep.train.state import TrainState
from truestep.train.step import train_step

ROWS = "rows=7 size=2 documents=True bias=all"
EVERYTHING = ["attention", "mlp", "embeddings"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FSDP": ("dp_shard=4", {"targets": [*EVERYTHING, "head"], "rank": 3}),
    "DDP": ("dp_replicate=3 tie=True", {"targets": EVERYTHING}),
    "HSDP": ("dp_replicate=2 dp_shard=2 tie=True", {"targets": EVERYTHING, "rslora": True}),
    "tensor": ("tp=2 vocab=37 inner=22 tie=True", {"targets": EVERYTHING, "dropout": 0.3}),
    "more tensor ranks than key heads": ("tp=4 kv_heads=1 qk_norm=full", {"dropout": 0.3}),
    "key heads by need": ("tp=4 kv_heads=2", {"targets": EVERYTHING}),
    "FSDP x tensor, head": ("dp_shard=2 tp=2 qk_norm=head", {"targets": [*EVERYTHING, "head"], "dropout": 0.5}),
    "pipeline": ("pp=2", {"dropout": 0.3}),
    "zero bubble": ("pp=2 schedule=zbv layers=4", {"targets": ["mlp"]}),
    "tied table in a pipeline": ("pp=2 tie=True", {}),
    "DP x TP x PP": ("dp_shard=2 tp=2 pp=2", {"targets": [*EVERYTHING, "head"]}),
    "context": ("cp=2", {"targets": EVERYTHING, "dropout": 0.3}),
    "latent attention": ("tp=2 cp=2 mla=queries", {"dropout": 0.3}),
    "experts": ("dp_shard=2 ep=2 moe=mixtral", {"targets": ["attention", "experts"]}),
    "DP x EP x TP": ("dp_shard=2 ep=4 tp=2 moe=deepseek mla=queries", {"targets": ["experts", "mlp"]}),
    "recomputed": ("dp_shard=2 recompute=full", {"dropout": 0.3}),
}


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(pool, name, reduction):
    line, lora = CASES[name]
    if reduction == "exact" and name not in ("FSDP", "HSDP", "DP x TP x PP", "tied table in a pipeline"):
        pytest.skip("one of each kind is enough")
    one = parse(f"{line} {ROWS} optimizer=adamw")
    wanted = pool.run(train, 1, one.on(), lora, "fast", timeout_s=PATIENCE_S)[0]
    found = pool.run(train, one.world, one, lora, reduction, timeout_s=PATIENCE_S)[0]
    assert all(map(is_adapter, wanted.gradients)) and all(grad.abs().max() > 0 for grad in wanted.gradients.values())
    assert worst(errors(found.gradients, wanted.gradients))[0] < 1e-9
    assert worst(errors(found.weights, wanted.weights))[0] < 1e-6
    assert found.losses == pytest.approx(wanted.losses, rel=1e-9)
    base = oracle.whole_weights(one)
    assert all(torch.equal(found.weights[n], base[n].double()) for n in base if not n.endswith(("load", "router.bias")))


def test_a_checkpoint_holds_no_base(pool):
    """Neither it nor the optimizer has anything of the frozen weights."""
    one = parse(f"dp_shard=2 {ROWS} optimizer=adamw")
    names = pool.run(kept, 2, one, timeout_s=PATIENCE_S)[0]
    assert names and all(is_adapter(name) for name in names)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_products_in_one_with_collectives(pool, dropout):
    """async_tp, by what its operators fall back to on a CPU."""
    one, lora = parse(f"tp=2 {ROWS} optimizer=adamw"), {"targets": EVERYTHING, "dropout": dropout}
    wanted = pool.run(train, 1, one.on(), lora, "fast", timeout_s=PATIENCE_S)[0]
    found = pool.run(train_fused, 2, one, lora, timeout_s=PATIENCE_S)[0]
    assert worst(errors(found.gradients, wanted.gradients))[0] < 1e-9
    assert found.losses == pytest.approx(wanted.losses, rel=1e-9)


def train_fused(rank: int, world: int, one: Composition, lora: dict[str, Any]) -> Found:
    machine = Composition.machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "require_gpu", lambda machine, device: None)
        patch.setattr(Composition, "machine", lambda self: machine(self).model_copy(update={"async_tp": True}))
        return train(rank, world, one, lora, "fast")


def adapted(rank: int, world: int, one: Composition, lora: dict[str, Any], reduction: str = "fast") -> TrainState:
    """The state at step 0, adapters at values that are none of them plain."""
    section = {"rank": 4, "alpha": 6.0, **lora}
    state = start(rank, world, one, stage={"start": "somewhere", "lora": section}, reduction=reduction, prepare=adapt)
    with torch.no_grad():
        for name, piece in state.parallel.pieces().items():
            if is_adapter(name):
                piece.local.copy_(values(name, piece, one))
    state.parallel.updated()
    return state


def values(name: str, piece: Piece, one: Composition) -> torch.Tensor:
    return oracle._values(name, piece.shape, one)[piece.region]


def train(rank: int, world: int, one: Composition, lora: dict[str, Any], reduction: str) -> Found:
    """Three steps; gradients of the first one."""
    state, found = adapted(rank, world, one, lora, reduction), Found()
    for step in range(3):
        batch = oracle.global_batch(one, step, 0)
        with captured(state, found) if step == 0 else nullcontext():
            result = train_step(state, share(one, batch, rank), batch.num_targets, [])
        found.losses.append(result.loss)
    found.weights = whole(state.parallel.pieces())
    return found if rank == 0 else Found()


def kept(rank: int, world: int, one: Composition) -> list[str]:
    """Names of what a checkpoint holds of the model, and of what has optimizer state."""
    state = adapted(rank, world, one, {})
    state.base = "digest"
    saved = [name.removeprefix("model.") for name in state.tensors() if name.startswith("model.")]
    return [*saved, *state.optimizer.named_params]


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("line", ["dp_shard=2", "dp_replicate=2", "tp=2", "pp=2", "dp_shard=2 ep=2 moe=mixtral"])
def test_frozen_weights_are_held_in_the_dtype_of_products(pool, line, reduction):
    """Beside adapters in fp32; FSDP2 gathers both together."""
    one, lora = parse(f"{line} {ROWS} optimizer=adamw precision=bfloat16"), {"targets": ["attention", "embeddings"]}
    wanted = pool.run(train, 1, one.on(), lora, reduction, timeout_s=PATIENCE_S)[0]
    found = pool.run(train, one.world, one, lora, reduction, timeout_s=PATIENCE_S)[0]
    assert found.losses == pytest.approx(wanted.losses, rel=2e-2)
    kinds = {name: x.dtype for name, x in found.weights.items() if x.ndim > 1 and not name.endswith("router.weight")}
    assert all((dtype == torch.float32) == is_adapter(name) for name, dtype in kinds.items())
    if reduction == "exact" and line.startswith("dp_") and "ep" not in line.split():
        assert found.losses == wanted.losses
