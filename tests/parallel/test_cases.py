"""Named cases of parallel training (CASES.md: C15, C29, C30, C32, C33, C35), with the code that trains."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.parallel import oracle
from tests.parallel.compositions import parse
from tests.parallel.harness import check, ranks_train, share, start
from truestep.losses.cross_entropy import CrossEntropy
from truestep.numerics.axis import Axes, Axis
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput
from truestep.numerics.pieces import Piece, span
from truestep.optim.clip import clip_coefficient
from truestep.parallel.reduce import global_norm, sum_missing
from truestep.recipe.machine import Context
from truestep.train.step import train_step


def _axis(name: str, rank: int, world: int) -> Axis:
    return Axis(name, world, rank, dist.group.WORLD if world > 1 else None)


# C15: pipeline backward runs on the raw sum, clipping hides it


def _norms(rank, world, one, clip_norm):
    state = start(rank, world, one)
    state.section = state.section.model_copy(update={"clip_norm": clip_norm})
    batch = oracle.global_batch(one, 0, 0)
    result = train_step(state, share(one, batch, rank), batch.num_targets, [])
    return result.grad_norm, result.clip, result.loss


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zbv"])
def test_c15_the_norm_before_clipping_is_that_of_one_process(pool, schedule):
    """Clipped to a hundredth of the norm, so that after clipping a factor would not be seen."""
    one = parse(f"pp=2 schedule={schedule} layers=4 documents=True")
    want = next(oracle.train(one, 1))
    for norm, clip, loss in pool.run(_norms, 2, one, want.norm / 100):
        assert norm == pytest.approx(want.norm, rel=1e-10)
        assert clip == pytest.approx(0.01, rel=1e-10)
        assert loss == pytest.approx(want.loss, rel=1e-10)


# C29: tied weights come apart


def _tables(rank, world, one, steps):
    """The embedding's and the head's local table after every step, where this rank has them, and the gradient."""
    state = start(rank, world, one)
    found = []
    for step in range(steps):
        batch = oracle.global_batch(one, step, 0)
        train_step(state, share(one, batch, rank), batch.num_targets, [])
        mirror = state.parallel.mirror
        assert mirror is not None
        found.append([None if p is None else _plain(p) for p in (mirror.owner, mirror.copy)])
    return found


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    x = parameter.detach()
    return (x.to_local() if hasattr(x, "to_local") else x).clone()


@pytest.mark.parametrize("mesh", ["pp=2", "dp_replicate=2 pp=2", "dp_shard=2 pp=2", "tp=2 pp=2"])
def test_c29_a_tied_table_stays_one_over_a_pipeline(pool, tmp_path, mesh):
    """The gradient is the embedding's and the head's together, once; the two are equal bit for bit after every step,
    and a checkpoint has the table once, which loads where it is a single tensor."""
    one = parse(f"{mesh} tie=True vocab=37")
    report = check(pool, one, tmp_path, steps=3, elsewhere=one.on())
    assert not report.faults()
    found = pool.run(_tables, one.world, one, 3)
    half = (
        one.world // 2
    )  # the pipeline is the outermost axis: rank r of the first half has the table, r + half its copy
    for rank in range(half):
        for (owner, nothing), (none, copy) in zip(found[rank], found[rank + half]):
            assert nothing is None and none is None and torch.equal(owner, copy)
    assert not torch.equal(found[0][0][0], found[0][2][0])


@pytest.mark.parametrize("mesh", ["", "dp_shard=2", "dp_replicate=2", "tp=2"])
def test_c29_meta_build_and_wrapping_keep_the_tie(pool, tmp_path, mesh):
    one = parse(f"{mesh} tie=True")
    report = check(pool, one, tmp_path, steps=3, elsewhere=one.on(dp_shard=3))
    assert not report.faults()
    found = pool.run(ranks_train, one.world, one, [0], "", "")[0]
    assert "embed.weight" in found.weights and not any("head" in name for name in found.weights)


# C30: vocabulary that does not divide


def _even_loss(rank, world, vocab):
    """All logits 0 on this rank's rows of the head."""
    first, stop = span(vocab, world, rank)
    hidden_BTD = torch.zeros(1, 6, 4, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(stop - first, 4, dtype=torch.float64, requires_grad=True)
    labels_BT = torch.tensor([[0, 3, 9, 5, IGNORE, 7]])
    head = HeadInput(hidden_BTD, weight_VD, None, _axis("tp", rank, world), first, vocab)
    batch = Batch(labels_BT, labels_BT, labels_BT, None)
    result = CrossEntropy(z_loss=0.0, chunk_tokens=2)(head, batch)
    result.sum.backward()
    return result.sum.item() / batch.num_targets, tuple(head.logits().shape), tuple(weight_VD.shape)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_c30_ten_even_logits_cost_ln_ten_on_any_number_of_ranks(pool, world):
    found = pool.run(_even_loss, world, 10)
    for loss, logits, _ in found:
        assert loss == pytest.approx(math.log(10), rel=1e-12)
        assert logits == (1, 6, 10), "no id beyond the vocabulary can be sampled"
    assert sum(rows for _, _, (rows, _) in found) == 10, "there are no rows of padding"


@pytest.mark.parametrize("tp", [2, 5])
def test_c30_a_vocabulary_cut_in_four_loads_where_it_is_cut_in_two_or_five(pool, tmp_path, tp):
    one = parse("tp=4 vocab=10 heads=5 kv_heads=1 context=20")
    report = check(pool, one, tmp_path, elsewhere=one.on(tp=tp))
    assert not report.faults() and report.same_bits
    found = pool.run(ranks_train, 4, one, [0], "", "")[0]
    assert found.weights["head.weight"].shape[0] == found.weights["embed.weight"].shape[0] == 10


# C32: sequence-parallel norm gradients not summed


def _sum_of_two(rank, world):
    gradient = torch.tensor([[3.0], [7.0]][rank])
    sum_missing([(gradient, _axis("tp", rank, world))])
    return gradient.item()


def _whole_copies(rank, world, one, steps):
    """This rank's norm weights after `steps` updates."""
    state = start(rank, world, one)
    for step in range(steps):
        batch = oracle.global_batch(one, step, 0)
        train_step(state, share(one, batch, rank), batch.num_targets, [])
    named = state.parallel.pieces().items()
    return {name: piece.local.clone() for name, piece in named if "norm" in name and piece.local.shape == piece.shape}


def test_c32_each_rank_has_the_sum_over_the_whole_sequence(pool):
    assert pool.run(_sum_of_two, 2) == [10.0, 10.0]


def test_c32_norm_weights_are_equal_bit_for_bit_after_ten_steps(pool):
    one = parse("tp=2 placement=sandwich qk_norm=head precision=float32")
    first, second = pool.run(_whole_copies, 2, one, 10)
    assert len(first) == 13 and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# C33: one global norm over shards, replicas and experts

LAYOUTS = {
    "shards with norms 3 and 4": ([([3.0], True)], [([4.0], True)], 5.0),
    "experts with squared norms 20 and 100": ([([2.0, 4.0], True)], [([10.0], True)], math.sqrt(120)),
    "a weight of norm 3 that both hold": ([([3.0], True)], [([3.0], False)], 3.0),
    "nothing on one rank": ([([3.0, 4.0], True)], [], 5.0),
}


def _norm(rank, world, layout):
    held = LAYOUTS[layout][rank]
    pieces = [Piece(torch.tensor(x, dtype=torch.float64), (9,), (0,), owned) for x, owned in held]
    norm = global_norm(pieces, _axis("world", rank, world), torch.device("cpu"))
    return norm.item(), clip_coefficient(norm, 1.0).item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c33_each_element_counts_once_and_every_rank_clips_alike(pool, layout):
    want = LAYOUTS[layout][2]
    first, second = pool.run(_norm, 2, layout)
    assert first == second
    assert first[0] == pytest.approx(want, rel=1e-12) and first[1] == pytest.approx(1 / want, rel=1e-12)


# C35: context parallelism: shard, then shift


def _labels(size: int, balance: bool, cut: int) -> list[list[int]]:
    """Labels of each rank for a row of the tokens 1 to 8 whose documents are cut behind `cut` tokens (0: one)."""
    tokens_BT = torch.arange(1, 9)[None]
    labels_BT = torch.tensor([[2, 3, 4, 5, 6, 7, 8, IGNORE]])
    if cut:
        labels_BT[0, cut - 1] = IGNORE
    documents_BT = (torch.arange(8)[None] >= cut).to(torch.int32)
    row = Batch(tokens_BT, labels_BT, torch.arange(8)[None], documents_BT)
    found = []
    for rank in range(size):
        cp = Axis("cp", size, rank, object())  # pyright: ignore[reportArgumentType]  # nothing is sent
        part = row.part(Axes(cp=cp, context=Context(balance=balance)).columns(8))
        found.append(part.labels_BT[0].tolist())
    return found


def test_c35_labels_are_shifted_before_rows_are_cut():
    assert _labels(2, False, 0) == [[2, 3, 4, 5], [6, 7, 8, IGNORE]]
    assert _labels(2, True, 0) == [[2, 3, 8, IGNORE], [4, 5, 6, 7]]
    assert _labels(2, False, 4) == [[2, 3, 4, IGNORE], [6, 7, 8, IGNORE]], "a document's edge on that of the parts"
    assert [sum(x != IGNORE for part in _labels(2, b, 0) for x in part) for b in (False, True)] == [7, 7]


@pytest.mark.parametrize("style", ["balance=True", "balance=False", "style=ulysses"])
@pytest.mark.parametrize("cp", [2, 4])
def test_c35_the_loss_is_that_of_one_rank(pool, tmp_path, style, cp):
    """Documents of the first row meet exactly where parts do (see oracle.global_batch)."""
    one = parse(f"cp={cp} {style} heads=4 documents=True")
    assert not check(pool, one, tmp_path).faults()
