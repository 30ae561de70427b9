"""Losses of reward models from their formulas, in value and gradient, on pairs that share rows with others."""

import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy, logsigmoid

from truestep.errors import UserError
from truestep.losses.reward import Pairs, Steps, last_places
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput, Scores


def batch(rows, length=16) -> Batch:
    """Each row a list of (unit, side, value, tokens), one document each; the value of a token may differ."""
    shape = len(rows), length
    documents, unit = torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
    side, counted, value = torch.zeros(shape, dtype=torch.int8), torch.zeros(shape), torch.zeros(shape)
    for row, samples in enumerate(rows):
        at, seen = 0, set()
        for number, (which, sign, values, tokens) in enumerate(samples):
            here = slice(at, at + tokens)
            documents[row, here], unit[row, here], side[row, here] = number, which, sign
            value[row, here] = torch.as_tensor(values)
            counted[row, at] = which not in seen
            seen.add(which)
            at += tokens
    zeros = torch.zeros(shape, dtype=torch.int64)
    columns = {"unit": unit, "side": side, "counted": counted, "value": value}
    return Batch(zeros, torch.full(shape, IGNORE), zeros, documents, columns)


PAIRS = [[(0, 1, 0.5, 3), (0, -1, 0.5, 4), (1, 1, 0.0, 2), (1, -1, 0.0, 5)], [(0, 1, 1.25, 1), (0, -1, 1.25, 2)]]
ENDS = [(0, 2, 6, 0.5), (0, 8, 13, 0.0), (1, 0, 2, 1.25)]  # row, chosen's end, rejected's, margin


def scores(like: Batch, seed=0) -> Scores:
    drawn = torch.randn(like.tokens_BT.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Scores(drawn.requires_grad_())


@pytest.mark.parametrize("margins", [False, True])
@pytest.mark.parametrize("center", [0.0, 0.1])
def test_pairs_equal_the_formula(margins, center):
    """TRL's RewardTrainer: -logsigmoid(chosen - rejected - margin), + coefficient (chosen + rejected)^2."""
    rows = batch(PAIRS)
    out, loss = scores(rows), Pairs(margins, center)
    found = loss(out, rows)
    c, r = (torch.stack([out.scores_BT[end[0], end[i]] for end in ENDS]) for i in (1, 2))
    m = torch.tensor([end[3] if margins else 0.0 for end in ENDS], dtype=torch.float64)
    expected = (-logsigmoid(c - r - m) + center * (c + r) ** 2).sum()
    torch.testing.assert_close(found.sum, expected, rtol=1e-12, atol=0)
    ours, wanted = torch.autograd.grad(found.sum, out.scores_BT), torch.autograd.grad(expected, out.scores_BT)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-15)
    assert loss.weight(rows) == 3
    figures = {"accuracy": (c > r).double().sum(), "margin": (c - r).sum(), "score": ((c + r) / 2).sum()}
    assert {n: x.item() for n, x in found.metrics.items()} == pytest.approx({n: x.item() for n, x in figures.items()})


def test_a_head_of_zeros_loses_ln_2_a_pair():
    rows = batch(PAIRS)
    assert Pairs()(Scores(torch.zeros(2, 16)), rows).sum.item() == pytest.approx(3 * math.log(2), rel=1e-6)


def test_rows_without_pairs_count_nothing():
    rows = batch(PAIRS).without_targets()
    out = scores(rows)
    found = Pairs(margins=True, center=0.1)(out, rows)
    assert found.sum == 0 and not torch.autograd.grad(found.sum, out.scores_BT)[0].any()
    assert Pairs().weight(rows) == 0 and all(x == 0 for x in found.metrics.values())
    assert Steps().weight(rows) == 0


def test_steps_equal_the_formula():
    """arXiv 2305.20050: a label for each step, here soft ones too. Padding's zeros are no labels."""
    nan = math.nan
    rows = batch([[(0, 0, [nan, nan, 1.0, nan, 0.0], 5), (1, 0, [nan, 0.25], 2)]])
    out = scores(rows)
    found = Steps()(out, rows)
    places, labels = [2, 4, 6], torch.tensor([1.0, 0.0, 0.25], dtype=torch.float64)
    expected = binary_cross_entropy(out.scores_BT[0, places].sigmoid(), labels, reduction="sum")
    torch.testing.assert_close(found.sum, expected, rtol=1e-9, atol=0)
    ours, wanted = torch.autograd.grad(found.sum, out.scores_BT), torch.autograd.grad(expected, out.scores_BT)
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-12)
    assert Steps().weight(rows) == 3
    hits = ((out.scores_BT[0, places] > 0) == (labels > 0.5)).sum().item()
    assert found.metrics["accuracy"].item() == hits


def test_property_19_last_places_come_from_documents_and_never_from_ids():
    """posttraining-anchors, section 4, properties 17 and 19."""
    rows = batch(PAIRS)
    assert last_places(rows).nonzero().tolist() == [[0, 2], [0, 6], [0, 8], [0, 13], [1, 0], [1, 2]]
    whole = Batch(rows.tokens_BT, rows.labels_BT, rows.positions_BT, None)
    assert last_places(whole).nonzero().tolist() == [[0, 15], [1, 15]]


def test_a_model_with_logits_is_refused():
    rows = batch(PAIRS)
    with pytest.raises(UserError, match="needs a model with a score head"):
        Pairs()(HeadInput(torch.zeros(2, 16, 4), torch.zeros(8, 4)), rows)
