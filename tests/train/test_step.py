"""The step: one device equals many, and the result knows nothing of how rows were cut."""

import pytest
import torch

from tests import tiny
from tests.dist import run_ranks
from truestep.numerics.batch import IGNORE, Batch
from truestep.recipe.machine import Mesh
from truestep.sentinel.finite import Verdict
from truestep.train.step import stream, train_step

RELATIVE = {"float32": 1e-6, "float64": 1e-12}
MESHES = {
    "fsdp2": (2, Mesh()),
    "fsdp3": (3, Mesh()),
    "fsdp4": (4, Mesh()),
    "ddp2": (2, Mesh(dp_replicate=2, dp_shard=1)),
    "ddp3": (3, Mesh(dp_replicate=3, dp_shard=1)),
    "hsdp4": (4, Mesh(dp_replicate=2, dp_shard=2)),
}


def gradients_of(batches: list[Batch], precision="float64", monkey=None, **options) -> tuple[dict, float, float]:
    """Gradients as the optimizer sees them (before clipping), loss and norm of one step on one device."""
    training = tiny.state(tiny.job(), precision=precision, optim={"lr": 1e-2, "clip_norm": 0}, **options)
    return stepped(training, batches)


def stepped(training, batches, num_targets=None):
    kept = {}
    zero = training.parallel.zero_grad

    def keep():
        kept.update(tiny.whole_gradients(training))
        zero()

    training.parallel.zero_grad = keep
    if num_targets is None:
        num_targets = sum(batch.num_targets for batch in batches)
    result = train_step(training, batches, num_targets, [])
    return kept, result.loss, result.grad_norm


def assert_same(a: dict, b: dict, relative: float) -> None:
    scale = torch.cat([x.flatten() for x in a.values()]).norm()
    assert scale > 0
    for name in a:
        assert (a[name] - b[name]).norm() <= relative * scale, name


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_accumulation_does_not_change_the_gradient(size, precision):
    batch = tiny.rows()[0]
    whole, loss, norm = gradients_of([batch], precision)
    split, loss_split, norm_split = gradients_of(tiny.cut(batch, size), precision)
    assert_same(whole, split, RELATIVE[precision])
    assert loss_split == pytest.approx(loss, rel=RELATIVE[precision])
    assert norm_split == pytest.approx(norm, rel=RELATIVE[precision])


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_padding_and_row_order_do_not_change_the_gradient(precision):
    batch = tiny.rows()[0]
    whole, loss, _ = gradients_of([batch], precision)
    order = torch.randperm(tiny.ROWS, generator=torch.Generator().manual_seed(0))
    shuffled = batch.map(lambda x: x[order])
    assert_same(whole, gradients_of([shuffled], precision)[0], RELATIVE[precision])
    padded, loss_padded, _ = gradients_of([tiny.padding(batch), *tiny.cut(batch, 4), tiny.padding(batch)], precision)
    assert_same(whole, padded, RELATIVE[precision])
    assert loss_padded == pytest.approx(loss, rel=RELATIVE[precision])


def test_gradient_equals_that_of_the_plain_mean_over_targets():
    """Against autograd of torch's own cross-entropy over the whole batch: no constant factor anywhere (C15)."""
    batch = tiny.rows()[0]
    ours, loss, norm = gradients_of(tiny.cut(batch, 3))
    training = tiny.state(tiny.job(), precision="float64")
    model = training.parallel.bare
    logits_BTV = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    plain = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORE)
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-12)
    theirs = {name: p.grad for name, p in model.named_parameters()}
    assert_same(theirs, ours, 1e-12)
    total = torch.cat([g.flatten() for g in theirs.values()]).norm().item()
    assert norm == pytest.approx(total, rel=1e-12)


def _ranks(rank, world, mesh, precision, size):
    here = tiny.job(rank, world)
    training = tiny.state(here, precision=precision, mesh=mesh, optim={"lr": 1e-2, "clip_norm": 0})
    batch = tiny.rows()[0]
    grads, loss, norm = stepped(training, tiny.share(batch, rank, world, size), batch.num_targets)
    return grads, loss, norm


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_every_mesh_equals_one_device(name, precision):
    world, mesh = MESHES[name]
    whole, loss, norm = gradients_of([tiny.rows()[0]], precision)
    for grads, rank_loss, rank_norm in run_ranks(_ranks, world, mesh, precision, 2):
        assert_same(whole, grads, RELATIVE[precision])
        assert rank_loss == pytest.approx(loss, rel=RELATIVE[precision])
        assert rank_norm == pytest.approx(norm, rel=RELATIVE[precision])


def _losses(rank, world, mesh, precision, optim):
    training = tiny.state(tiny.job(rank, world), precision=precision, mesh=mesh, optim=optim)
    found = []
    for batch in tiny.rows(50):
        found.append(train_step(training, tiny.share(batch, rank, world, 3), batch.num_targets, []).loss)
    return found


ADAMW, MUON = {"kind": "adamw", "lr": 3e-3}, {"kind": "muon", "lr": 1e-3, "muon_dtype": "float32"}


@pytest.mark.parametrize(
    "precision,bound,optim", [("float32", 1e-5, ADAMW), ("float64", 1e-9, ADAMW), ("float32", 1e-5, MUON)]
)
def test_one_to_four_processes_have_equal_losses_for_50_steps(precision, bound, optim):
    alone = _losses(0, 1, Mesh(), precision, optim)
    for world in (2, 3, 4):
        assert run_ranks(_losses, world, Mesh(), precision, optim)[0] == pytest.approx(alone, rel=bound)


def test_c12_short_microbatches_weigh_no_more_than_their_targets():
    batch = tiny.rows()[0]
    pieces = tiny.cut(batch, 3)
    assert len({piece.num_targets for piece in pieces}) > 1
    training = tiny.state(tiny.job(), precision="float64")
    result = train_step(training, pieces, batch.num_targets, [])
    assert result.loss == pytest.approx(sum(s for s, _, _ in result.shards) / batch.num_targets, rel=1e-12)
    assert [w for _, w, _ in result.shards] == [piece.num_targets for piece in pieces]


def test_c13_rank_loss_is_weighted_by_targets():
    batch = tiny.rows()[0]
    alone = gradients_of([batch])[1]
    for _, loss, _ in run_ranks(_ranks, 2, Mesh(), "float64", 1):
        assert loss == pytest.approx(alone, rel=1e-12)


def test_c19_rank_without_targets_and_batch_without_targets():
    batch = tiny.rows()[0]
    empty = tiny.padding(batch)
    alone = gradients_of([batch])[0]
    assert_same(alone, gradients_of([empty, batch])[0], 1e-12)
    training = tiny.state(tiny.job(), precision="float64")
    before = {n: p.detach().clone() for n, p in training.parallel.bare.named_parameters()}
    result = train_step(training, [empty], 0, [])
    assert result.verdict is Verdict.SKIP and result.loss == 0.0 and training.updates == 0 and training.step == 1
    assert all(torch.equal(before[n], p) for n, p in training.parallel.bare.named_parameters())


def _norms(rank, world, mesh):
    training = tiny.state(tiny.job(rank, world), precision="float64", mesh=mesh)
    batch = tiny.rows()[0]
    result = train_step(training, tiny.share(batch, rank, world, 2), batch.num_targets, [])
    return [norm for _, _, norm in result.shards]


@pytest.mark.parametrize("name", MESHES)
def test_shard_norms_are_those_of_each_microbatch_before_reduction(name):
    world, mesh = MESHES[name]
    batch = tiny.rows()[0]
    pieces = tiny.cut(batch, 2)
    expected = []
    for piece in pieces:
        training = tiny.state(tiny.job(), precision="float64")
        expected.append(train_step(training, [piece], batch.num_targets, []).grad_norm)
    measured = run_ranks(_norms, world, mesh)
    for rank, norms in enumerate(measured):
        mine = expected[rank::world]
        assert norms[: len(mine)] == pytest.approx(mine, rel=1e-9)
        assert norms[len(mine) :] == [0.0] * (len(norms) - len(mine))


def test_c20_non_finite_gradients_are_never_applied():
    training = tiny.state(tiny.job())
    parameter = next(training.parallel.bare.parameters())
    parameter.register_hook(lambda grad: grad * float("nan"))
    before = parameter.detach().clone()
    batch = tiny.rows()[0]
    result = train_step(training, [batch], batch.num_targets, [])
    assert result.verdict is Verdict.SKIP and torch.equal(before, parameter)
    assert result.judgement.fault == "not finite" and training.spikes.skips == 1


def test_c23_overflow_under_fp16_skips_the_update_and_not_the_data():
    training = tiny.state(tiny.job(), precision="float16")
    training.scaler.scale = 2.0**40
    batch = tiny.rows()[0]
    first = train_step(training, [batch], batch.num_targets, [])
    assert first.verdict is Verdict.SKIP and (training.step, training.updates) == (1, 0)
    training.scaler.scale = 2.0**8
    second = train_step(training, [batch], batch.num_targets, [])
    assert second.verdict is Verdict.GO and (training.step, training.updates) == (2, 1)
    exact = gradients_of([batch], "float32")[2]
    assert second.grad_norm == pytest.approx(exact, rel=2e-2)  # unscaled: not 256 times as large


def test_c47_streams_of_ranks_and_steps_are_unlike():
    seeds = {stream(seed, step, rank) for seed in range(3) for step in range(20) for rank in range(20)}
    assert len(seeds) == 3 * 20 * 20
