"""Every option of the step has a parity row (the result is the same) and changes something that can be observed."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests import tiny
from tests.dist import run_ranks
from tests.train.test_step import assert_same, gradients_of, stepped
from truestep.errors import UserError
from truestep.models.decoder import Decoder
from truestep.parallel.apply import prefetch
from truestep.parallel.mesh import Limits
from truestep.plan.activations import block_activations, head_activations
from truestep.recipe.degrees import Degrees
from truestep.recipe.machine import Machine, Mesh
from truestep.train.step import train_step


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """How often an operator ran."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] = self.counts.get(function, 0) + 1
        return function(*args, **(kwargs or {}))


def counts(**options) -> dict:
    training = tiny.state(tiny.job(), precision="float64", **options)
    batch = tiny.rows()[0]
    with Counter() as counter:
        train_step(training, [batch], batch.num_targets, [])
    return counter.counts


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_gives_the_same_gradient(mode):
    batch = tiny.rows()[0]
    plain, loss, norm = gradients_of([batch])
    again, loss_again, norm_again = gradients_of([batch], activation_checkpointing=mode)
    assert_same(plain, again, 1e-12)
    assert (loss, norm) == pytest.approx((loss_again, norm_again), rel=1e-12)


def test_full_checkpointing_redoes_products_and_selective_keeps_them():
    silu = torch.ops.aten.silu.default
    products = torch.ops.aten.mm.default
    plain, full, selective = (counts(activation_checkpointing=m) for m in ("none", "full", "selective"))
    assert full[silu] == selective[silu] == 2 * plain[silu]
    assert full[products] > plain[products] == selective[products]


def _four_blocks() -> Decoder:
    with torch.device("meta"):
        return Decoder(tiny.section(num_layers=4))


def _needed(modes: list[str]) -> int:
    """Bytes of activations of blocks in these modes, as the plan counts them."""
    tokens = Machine().microbatch_rows * tiny.CONTEXT
    kept = [block_activations(tiny.section(), 0, Degrees(), tokens, 8, mode) for mode in modes]
    head = head_activations(tiny.section(), Degrees(), tokens, 8, 7)
    return sum(one.held for one in kept) + max(one.remade for one in kept) + head


MODES = {"all fits": "nnnn", "some selective": "ssnn", "all selective": "ssss", "some full": "ffss", "all full": "ffff"}


@pytest.mark.parametrize("name", MODES)
def test_a_budget_recomputes_as_little_as_it_allows_and_changes_no_number(name):
    modes = [{"n": "none", "s": "selective", "f": "full"}[letter] for letter in MODES[name]]
    auto = {"activation_checkpointing": "auto", "activation_memory": _needed(modes)}
    training = tiny.state(tiny.job(), precision="float64", model=_four_blocks(), **auto)
    assert list(training.recomputed.values()) == modes
    silu, product = torch.ops.aten.silu.default, torch.ops.aten.mm.default
    plain = counts(model=_four_blocks())
    full = counts(model=_four_blocks(), activation_checkpointing="full")
    found = counts(model=_four_blocks(), **auto)
    assert found[silu] == 8 - modes.count("none")
    assert (found[product] - plain[product]) * 4 == (full[product] - plain[product]) * modes.count("full")
    batch = tiny.rows()[0]
    wanted = gradients_of([batch], model=_four_blocks())[0]
    assert_same(wanted, gradients_of([batch], model=_four_blocks(), **auto)[0], 1e-12)


def test_a_budget_is_nothing_for_a_module_whose_blocks_are_not_known():
    with pytest.raises(UserError, match='is "auto", but what the blocks of a module of your own keep'):
        tiny.state(tiny.job(), model=torch.nn.Linear(2, 2), activation_checkpointing="auto")


def test_what_only_a_gpu_has_is_refused_on_a_cpu():
    with pytest.raises(UserError, match=r"machine\.async_tp needs the symmetric memory of CUDA devices"):
        tiny.state(tiny.job(), async_tp=True)
    with pytest.raises(UserError, match=r"machine\.offload_optimizer moves state from a GPU"):
        tiny.state(tiny.job(), offload_optimizer=True)


def test_a_mesh_that_the_model_does_not_allow_is_refused():
    limits = Limits(num_heads=4, machine=Machine())
    with pytest.raises(UserError, match=r"tp = 8, more than model\.num_heads 4; the nearest mesh of 8 processes"):
        tiny.state(replace(tiny.job(), world=8), mesh=Mesh(tp=8), limits=limits)


def test_head_chunks_change_memory_and_no_number():
    batch = tiny.rows()[0]
    whole = tiny.state(tiny.job(), precision="float64", optim={"lr": 1e-2, "clip_norm": 0})
    whole.loss = type(whole.loss)(z_loss=0.0, chunk_tokens=10_000)
    a, loss, _ = stepped(whole, [batch])
    b, loss_chunked, _ = gradients_of([batch])  # chunks of 7 tokens
    assert_same(a, b, 1e-12)
    assert loss == pytest.approx(loss_chunked, rel=1e-12)
    softmax = torch.ops.aten._log_softmax.default
    assert counts()[softmax] > 10


def test_z_loss_adds_its_term_per_target():
    batch = tiny.rows()[0]
    training = tiny.state(tiny.job(), precision="float64", loss={"z_loss": 1e-2})
    result = train_step(training, [batch], batch.num_targets, [])
    plain = tiny.state(tiny.job(), precision="float64")
    with torch.no_grad():
        logits = plain.parallel.bare(batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    log_z = torch.logsumexp(logits[batch.labels_BT != -100], dim=-1)
    without = train_step(plain, [batch], batch.num_targets, [])
    assert result.loss - without.loss == pytest.approx(1e-2 * log_z.square().mean().item(), rel=1e-9)
    assert result.metrics["nll"] == pytest.approx(without.loss, rel=1e-12)


def test_clipping_scales_the_update_and_not_the_reported_norm():
    batch = tiny.rows()[0]
    results = {}
    for limit in (0.0, 1e-3, 1e9):
        training = tiny.state(tiny.job(), precision="float64", optim={"lr": 1e-2, "clip_norm": limit})
        results[limit] = train_step(training, [batch], batch.num_targets, [])
    norms = {result.grad_norm for result in results.values()}
    assert len(norms) == 1
    assert results[0.0].clip == results[1e9].clip == 1.0
    assert results[1e-3].clip == pytest.approx(1e-3 / norms.pop(), rel=1e-9)


def _resharding(rank, world, reshard):
    training = tiny.state(
        tiny.job(rank, world), precision="float64", reshard_after_forward=reshard, optim={"lr": 1e-2, "clip_norm": 0}
    )
    batch = tiny.rows()[0]
    with CommDebugMode() as comm:
        grads, _, _ = stepped(training, tiny.share(batch, rank, world, 6), batch.num_targets)
    return grads, comm.get_total_counts()


def test_resharding_gathers_again_and_changes_no_number():
    freed, kept = run_ranks(_resharding, 2, True), run_ranks(_resharding, 2, False)
    assert_same(freed[0][0], kept[0][0], 1e-12)
    assert freed[0][1] > kept[0][1]


class _Order(torch.utils._python_dispatch.TorchDispatchMode):
    """Gathers of weights and activation functions of blocks, in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if "allgather" in name or function is torch.ops.aten.silu.default:
            self.seen.append("gather" if "allgather" in name else "block")
        return function(*args, **(kwargs or {}))


def _prefetching(rank, world, ahead):
    training = tiny.state(
        tiny.job(rank, world), precision="float64", model=_four_blocks(), optim={"lr": 1e-2, "clip_norm": 0}
    )
    if ahead:
        prefetch(training.parallel.bare)
    batch = tiny.rows()[0]
    with _Order() as order:
        grads, _, _ = stepped(training, tiny.share(batch, rank, world, 6), batch.num_targets)
    return grads, order.seen


def test_weights_of_the_next_block_are_gathered_ahead():
    (plain, before), (ahead, after) = (run_ranks(_prefetching, 2, ahead)[0] for ahead in (False, True))
    assert_same(plain, ahead, 1e-12)
    assert before[:5] == ["gather", "gather", "block", "gather", "block"]  # the root's own, then block by block
    assert after[:5] == ["gather", "gather", "gather", "block", "gather"]
    assert sorted(before) == sorted(after)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp_replicate=2, dp_shard=1)], ids=["fsdp", "ddp"])
def test_bfloat16_keeps_fp32_masters_and_reductions(mesh):
    for dtype, found in run_ranks(_low_precision, 2, mesh):
        assert dtype == "float32" and found == pytest.approx(gradients_of([tiny.rows()[0]], "float32")[2], rel=2e-2)


def _low_precision(rank, world, mesh):
    training = tiny.state(tiny.job(rank, world), precision="bfloat16", mesh=mesh)
    batch = tiny.rows()[0]
    result = train_step(training, tiny.share(batch, rank, world, 3), batch.num_targets, [])
    dtypes = {str(p.dtype).removeprefix("torch.") for p in training.parallel.bare.parameters()}
    assert len(dtypes) == 1
    return dtypes.pop(), result.grad_norm


@pytest.mark.slow
def test_compiled_blocks_give_the_same_gradient():
    batch = tiny.rows()[0]
    plain, _, _ = gradients_of([batch], "float32")
    compiled, _, _ = gradients_of([batch], "float32", compile=True)
    assert_same(plain, compiled, 1e-5)
