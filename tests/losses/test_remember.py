"""The pull to the start: KL of the model from it at every target, added to the loss, from its formula in float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from tests.losses.test_distill import case
from truestep.losses.cross_entropy import CrossEntropy
from truestep.losses.remember import HIDDEN, Remembering
from truestep.losses.sft import BySample
from truestep.numerics.batch import IGNORE, Batch


@pytest.mark.parametrize("by_sample", [False, True])
def test_equals_the_formula(by_sample):
    student, start, labels = case()
    zeros = torch.zeros_like(labels)
    weight_BT = torch.rand(labels.shape, dtype=torch.float64) * (labels != IGNORE)
    columns = {HIDDEN: start.hidden_BTD.detach()} | ({"weight": weight_BT} if by_sample else {})
    inner = BySample(CrossEntropy(0.0, 4)) if by_sample else CrossEntropy(0.0, 4)
    loss = Remembering(inner, 0.3, 6, replace(start, hidden_BTD=start.hidden_BTD[:0]))
    found = loss(student, Batch(zeros, labels, zeros, zeros.int(), columns))

    keep = labels.flatten() != IGNORE
    x, y = (one.logits().flatten(0, 1)[keep] for one in (student, start))
    each = weight_BT.flatten()[keep] if by_sample else torch.ones(len(x), dtype=torch.float64)
    kl = (kl_div(y.detach().log_softmax(1), x.log_softmax(1), reduction="none", log_target=True).sum(1) * each).sum()
    nll = (cross_entropy(x, labels.flatten()[keep], reduction="none") * each).sum()
    torch.testing.assert_close(found.sum, nll + 0.3 * kl, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.metrics["kl_to_start"], kl.detach(), rtol=1e-10, atol=1e-10)
    given = student.hidden_BTD, student.weight_VD
    ours, wanted = torch.autograd.grad(found.sum, given), torch.autograd.grad(nll + 0.3 * kl, given)
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-10)


def test_at_the_start_there_is_no_pull():
    student, _, labels = case(torch.float32)
    zeros = torch.zeros_like(labels)
    columns = {HIDDEN: student.hidden_BTD.detach()}
    loss = Remembering(CrossEntropy(), 5.0, 64, replace(student, hidden_BTD=student.hidden_BTD[:0]))
    batch = Batch(zeros, labels, zeros, zeros.int(), columns)
    given = student.hidden_BTD, student.weight_VD
    found, plain = loss(student, batch), CrossEntropy()(student, batch)
    assert found.metrics["kl_to_start"] == 0 and found.sum == plain.sum
    ours, theirs = torch.autograd.grad(found.sum, given), torch.autograd.grad(plain.sum, given)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
