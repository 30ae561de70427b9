"""Weights of targets: the fused cross-entropy equals plain torch in float64 on every path; a loss by sample is the mean
over samples of their means, however they are packed, cut into microbatches and ordered."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import linear

from tests.data.sample_fakes import make_samples
from tests.dist import run_ranks
from tests.losses.test_cross_entropy import TOLERANCE, batch, case, close
from truestep.data.loader import Corpus, Loader, evaluation_batches
from truestep.data.sample_packing import Supervision
from truestep.data.samples import Sample
from truestep.errors import UserError
from truestep.losses.base import Loss, open_loss
from truestep.losses.cross_entropy import CrossEntropy, linear_cross_entropy
from truestep.losses.sft import BySample
from truestep.models.build import build_model, init_weights
from truestep.numerics.axis import Axis
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput, Logits, OwnLoss
from truestep.numerics.pieces import span
from truestep.recipe.model import ModelSection
from truestep.recipe.posttrain import Sft
from truestep.recipe.stage import Stage

VOCAB = 50


def weights_for(labels_BT: torch.Tensor, seed: int = 4) -> torch.Tensor:
    """Of targets; other places have some as well, which must not count."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(labels_BT.shape, generator=random) + 0.1


def reference(hidden, weight, labels_BT, weights_BT, softcap=None, z_loss=0.0):
    """Σ w·(nll + z·(log Z)²) over the targets, by torch's own cross-entropy."""
    logits_NV = linear(hidden, weight).flatten(0, 1)
    if softcap is not None:
        logits_NV = softcap * (logits_NV / softcap).tanh()
    nll_N = torch_cross_entropy(logits_NV, labels_BT.flatten(), ignore_index=IGNORE, reduction="none")
    real_N = labels_BT.flatten() != IGNORE
    each_N = nll_N + z_loss * logits_NV.logsumexp(-1).square() * real_N
    return (weights_BT.flatten() * each_N).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk, ignored", [(1, 4), (4, 0), (1000, 4)])
def test_weighted_sums_equal_plain_torch(dtype, softcap, z_loss, chunk, ignored):
    hidden, weight, labels = case(dtype, ignored=ignored)
    weights = weights_for(labels)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = reference(*wide, labels, weights.double(), softcap, z_loss)
    theirs = torch.autograd.grad(expected / 3, wide)
    loss = CrossEntropy(z_loss, chunk)
    for out in (HeadInput(hidden, weight, softcap), Logits(HeadInput(hidden, weight, softcap).logits())):
        found = loss.weighted(out, batch(labels), weights)
        assert close(found.sum.double(), expected, TOLERANCE[dtype])
        assert close(
            found.metrics["nll"].double(), reference(*wide, labels, weights.double(), softcap), TOLERANCE[dtype]
        )
        ours = torch.autograd.grad(found.sum / 3, (hidden, weight), retain_graph=True)
        assert all(close(a.double(), b, TOLERANCE[dtype]) for a, b in zip(ours, theirs))


def test_weights_of_one_change_no_bit():
    hidden, weight, labels = case(torch.float32)
    plain, weighted = (
        linear_cross_entropy(hidden, weight, labels, 2.0, 0.1, 4, weights_BT=weights)[0]
        for weights in (None, torch.ones(labels.shape))
    )
    assert torch.equal(plain, weighted)
    pairs = (torch.autograd.grad(total, (hidden, weight)) for total in (plain, weighted))
    assert all(torch.equal(a, b) for a, b in zip(*pairs))


def test_a_weight_of_zero_takes_a_target_away():
    hidden, weight, labels = case()
    weights = torch.ones(labels.shape)
    weights[1] = 0.0
    without = labels.clone()
    without[1] = IGNORE
    ours, theirs = (
        linear_cross_entropy(hidden, weight, labels, weights_BT=weights)[0],
        linear_cross_entropy(hidden, weight, without)[0],
    )
    assert close(ours, theirs, 1e-12)
    pairs = (torch.autograd.grad(total, (hidden, weight)) for total in (ours, theirs))
    assert all(close(a, b, 1e-12) for a, b in zip(*pairs))


def _split(rank: int, world: int):
    hidden, weight, labels = case(rows=2, length=6, vocab=11)
    weights, axis = weights_for(labels), Axis("tp", world, rank, torch.distributed.group.WORLD)
    first, stop = span(11, world, rank)
    found = []
    for softcap, z_loss in ((None, 0.0), (2.0, 0.1)):
        expected = reference(hidden, weight, labels, weights.double(), softcap, z_loss)
        wanted = torch.autograd.grad(expected, (hidden, weight))
        mine = weight[first:stop].detach().requires_grad_()
        total, _ = linear_cross_entropy(hidden, mine, labels, softcap, z_loss, 4, axis, first, weights_BT=weights)
        assert close(total, expected, 1e-12)
        grad_hidden, grad_weight = torch.autograd.grad(total, (hidden, mine))
        torch.distributed.all_reduce(grad_hidden)
        assert close(grad_hidden, wanted[0], 1e-12) and close(grad_weight, wanted[1][first:stop], 1e-12)
        found.append(total.item())
    return found


def test_weights_on_a_split_vocabulary():
    first, second = run_ranks(_split, 2)
    assert first == second


def test_bfloat16_is_as_near_to_the_truth_as_with_equal_weights():
    hidden, weight, labels = case(torch.bfloat16, rows=4, length=32, width=16, vocab=50)
    weights = weights_for(labels)
    truth = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(reference(*truth, labels, weights.double()), truth)
    total, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=10, weights_BT=weights)
    for ours, right in zip(torch.autograd.grad(total, (hidden, weight)), exact):
        assert (ours - right).norm() <= 0.01 * right.norm()


def made_samples(count: int = 14, seed: int = 2) -> list[Sample]:
    """A prompt and an answer of uneven lengths each."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt, answer = random.integers(1, 6), random.integers(1, 12)
        ids = random.integers(1, VOCAB, prompt + answer)
        found.append(Sample(ids, np.repeat([0, 2], [prompt, answer]).astype(np.uint8)))
    return found


def open_of(weighting: str) -> Loss:
    kind = "sample" if weighting == "sample" else "token"
    stage = Stage(name="s", kind="sft", start="x", data="d", context=8, tokens=8, batch_tokens=8)
    return open_loss(stage.model_copy(update={"sft": Sft(weighting=kind)}), 5)


def tiny_model() -> torch.nn.Module:
    section = ModelSection(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1)
    with torch.device("meta"):
        model = build_model(section.resolved(VOCAB), VOCAB)
    model = model.to_empty(device="cpu").double()
    init_weights(model, 3)
    return model


def by_hand(model: torch.nn.Module, samples: list[Sample], weighting: str) -> torch.Tensor:
    """The loss of samples that are alone in their rows, from their logits, by plain torch."""
    means, nlls = [], []
    for one in samples:
        logits_TV = model(torch.from_numpy(one.ids)[None, :-1])[0]
        nll_T = torch_cross_entropy(logits_TV, torch.from_numpy(one.ids[1:]), reduction="none")
        nll_T = nll_T[torch.from_numpy(one.roles[1:]) > 0]
        means.append(nll_T.mean())
        nlls.append(nll_T)
    return torch.stack(means).mean() if weighting == "sample" else torch.cat(nlls).mean()


def of_batches(model: torch.nn.Module, loss: Loss, batches: list[Batch]) -> torch.Tensor:
    """The loss of a step on these microbatches, as the step makes it."""
    divisor = sum(float(loss.weight(one)) for one in batches)
    total = torch.zeros((), dtype=torch.float64)
    for one in batches:
        total = total + model(
            one.tokens_BT, one.positions_BT, one.documents_BT, lambda out, one=one: loss(out, one).sum
        )
    return total / divisor


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_packed_rows_give_the_loss_and_gradient_of_single_samples(tmp_path: Path, weighting: str):
    """In any packing, cut into microbatches in any way, in any order of rows, beside padding."""
    samples, model, loss = made_samples(), tiny_model(), open_of(weighting)
    store = make_samples(tmp_path / "s", [[[one]] for one in samples], VOCAB)
    expected = by_hand(model, samples, weighting)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    use = Supervision(by_sample=weighting == "sample", units=False)
    for context, rows in ((17, 1), (17, 3), (40, 2), (64, 100)):
        corpus = Corpus(store, supervision=use)
        for batches in (
            list(evaluation_batches(corpus, context, True, 0, 1, rows)),
            [Loader([corpus], context, seed).rows(np.arange(corpus.open(context, True).num_rows)) for seed in (1,)],
        ):
            found = of_batches(model, loss, batches)
            torch.testing.assert_close(found, expected, rtol=2e-7 if weighting == "sample" else 1e-12, atol=0)
            ours = torch.autograd.grad(found, list(model.parameters()))
            torch.testing.assert_close(list(ours), list(wanted), rtol=1e-6, atol=1e-9)


def test_packed_logits_equal_lone_ones(tmp_path: Path):
    """posttraining-anchors, section 4, property 5 (trl#805, LlamaFactory#4224)."""
    samples, model = made_samples(), tiny_model()
    store = make_samples(tmp_path / "s", [[[one]] for one in samples], VOCAB)
    lone = {tuple(one.ids.tolist()): model(torch.from_numpy(one.ids)[None])[0] for one in samples}
    seen = 0
    for one in evaluation_batches(Corpus(store), 40, True, 0, 1, 2):
        logits_BTV = model(one.tokens_BT, one.positions_BT, one.documents_BT)
        assert one.documents_BT is not None
        for row, documents in enumerate(one.documents_BT):
            for number in documents[documents >= 0].unique():
                here = documents == number
                theirs = lone[tuple(one.tokens_BT[row, here].tolist())]
                torch.testing.assert_close(logits_BTV[row, here], theirs, rtol=1e-10, atol=1e-12)
                seen += 1
    assert seen == len(samples)


def test_a_module_with_a_loss_of_its_own_has_no_weighted_targets():
    _, _, labels = case()
    columns = {"weight": torch.ones(labels.shape), "counted": torch.zeros(labels.shape)}
    with pytest.raises(UserError, match="the model returns a loss of its own"):
        BySample(CrossEntropy())(OwnLoss(torch.zeros(())), replace(batch(labels), columns=columns))
