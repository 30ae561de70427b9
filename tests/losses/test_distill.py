"""Distillation: every divergence from its formula in plain float64, in value and gradient; its limits; never all
logits."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist import run_ranks
from truestep.losses.distill import HIDDEN, IDS, LOGP, Distillation, Target, teacher_columns
from truestep.losses.divergence import divergence, likeliest
from truestep.numerics.axis import Axis
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput
from truestep.numerics.pieces import span

KINDS = [("forward", 0.5), ("reverse", 0.5), ("js", 0.5), ("js", 0.1), ("js", 0.9)]
VOCAB = 13


def case(dtype=torch.float64, rows=2, length=5, vocab=VOCAB, seed=0):
    """(student, teacher of another width, labels), every fourth place without a target."""
    g = torch.Generator().manual_seed(seed)

    def head(width: int) -> HeadInput:
        hidden = torch.randn(rows, length, width, generator=g, dtype=torch.float64).to(dtype)
        weight = torch.randn(vocab, width, generator=g, dtype=torch.float64).to(dtype)
        return HeadInput(hidden.requires_grad_(), weight.requires_grad_(), vocab_size=vocab)

    student, teacher = head(4), head(6)
    labels_BT = torch.randint(vocab, (rows, length), generator=g)
    labels_BT.view(-1)[::4] = IGNORE
    return student, teacher, labels_BT


def loss_of(student, teacher, labels_BT, target, hard=0.0, chunk=6, columns=None):
    zeros = torch.zeros_like(labels_BT)
    columns = {HIDDEN: teacher.hidden_BTD.detach()} if columns is None else columns
    loss = Distillation(target, hard, chunk, replace(teacher, hidden_BTD=teacher.hidden_BTD[:0]))
    return loss(student, Batch(zeros, labels_BT, zeros, zeros.int(), columns))


def classes_of(logp_NV, ids_NK):
    """The named tokens and all the others as one, from the full distribution."""
    named_NK = logp_NV.gather(1, ids_NK)
    rest_N1 = (1 - named_NK.exp().sum(1, keepdim=True)).log()
    return torch.cat([named_NK, rest_N1], dim=1)


def plain(student, teacher, labels_BT, target, hard=0.0):
    """By the formulas, with all logits. (loss, divergence, nll)."""
    keep, t = labels_BT.flatten() != IGNORE, target.temperature
    x_NV, y_NV = (one.logits().flatten(0, 1)[keep] for one in (student, teacher))
    y_NV = y_NV.detach()
    logq, logp = (x_NV / t).log_softmax(1), (y_NV / t).log_softmax(1)
    if target.top_k:
        ids = logp.topk(target.top_k).indices
        logq, logp = classes_of(logq, ids), classes_of(logp, ids)
    b = target.mix
    logm = (b * logp.exp() + (1 - b) * logq.exp()).log()
    value = {
        "forward": lambda: kl_div(logq, logp, reduction="sum", log_target=True),
        "reverse": lambda: kl_div(logp, logq, reduction="sum", log_target=True),
        "js": lambda: b * (logp.exp() * (logp - logm)).sum() + (1 - b) * (logq.exp() * (logq - logm)).sum(),
    }[target.kind]()
    nll = cross_entropy(x_NV, labels_BT.flatten()[keep], reduction="sum")
    return (1 - hard) * t**2 * value + hard * nll, value, nll


@pytest.mark.parametrize("kind, mix", KINDS)
@pytest.mark.parametrize("temperature, hard, top_k", [(1.0, 0.0, 0), (2.5, 0.3, 0), (0.7, 0.3, 4), (1.0, 0.0, 12)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_equals_the_formula(kind, mix, temperature, hard, top_k, softcap):
    student, teacher, labels = case()
    student, teacher = replace(student, softcap=softcap), replace(teacher, softcap=softcap)
    target = Target(kind, temperature, mix, top_k)
    ours = loss_of(student, teacher, labels, target, hard)
    expected, value, nll = plain(student, teacher, labels, target, hard)
    torch.testing.assert_close(ours.sum, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ours.metrics["divergence"], value.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(ours.metrics["nll"], nll.detach(), rtol=1e-11, atol=1e-11)
    given = student.hidden_BTD, student.weight_VD
    found, wanted = torch.autograd.grad(ours.sum * 0.3, given), torch.autograd.grad(expected * 0.3, given)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mix, right", [(0.0, 0.510826), (1.0, 0.368064), (0.5, 0.101749), (0.1, 0.043074)])
def test_case_c75_direction_and_ends(mix, right):
    """CASES C75; trl#3043, #6780, ms-swift#10078, #10213, verl-recipe#151."""
    logp, logq = (torch.tensor([pair], dtype=torch.float64).log() for pair in ((0.5, 0.5), (0.9, 0.1)))
    value, _ = divergence(logq, logp, "js", mix)
    assert value.item() == pytest.approx(right, abs=1e-6)


def test_case_c75_directions_are_not_exchanged():
    logp, logq = (torch.tensor([pair], dtype=torch.float64).log() for pair in ((0.5, 0.5), (0.9, 0.1)))
    assert divergence(logq.clone(), logp.clone(), "forward")[0].item() == pytest.approx(0.510826, abs=1e-6)
    assert divergence(logq, logp, "reverse")[0].item() == pytest.approx(0.368064, abs=1e-6)


@pytest.mark.parametrize("mix, limit", [(1e-5, "forward"), (1 - 1e-5, "reverse")])
def test_jensen_shannon_goes_to_the_two_directions(mix, limit):
    logq, logp = torch.randn(2, 6, 9, dtype=torch.float64).log_softmax(-1)
    value, grad = divergence(logq.clone(), logp.clone(), "js", mix)
    limit_value, limit_grad = divergence(logq.clone(), logp.clone(), limit)
    weight = min(mix, 1 - mix)
    torch.testing.assert_close(value / weight, limit_value, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(grad / weight, limit_grad, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kind, mix", [*KINDS, ("js", 0.0), ("js", 1.0)])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_property_56_distilling_to_itself_gives_0(kind, mix, top_k, dtype):
    """posttraining-anchors, section 4, property 56."""
    student, _, labels = case(dtype)
    ours = loss_of(student, student, labels, Target(kind, 2.0, mix, top_k))
    grads = torch.autograd.grad(ours.sum, (student.hidden_BTD, student.weight_VD))
    near = 2e-6 if kind == "js" else 0.0
    assert abs(ours.sum.item()) <= near and all(g.abs().max() <= 10 * near for g in grads)


@pytest.mark.parametrize("top_k", [0, 1, 4])
def test_property_56_divergences_are_never_negative(top_k):
    """posttraining-anchors, section 4, property 56: here for any pair of distributions, sharp ones too."""
    for seed in range(20):
        student, teacher, labels = case(torch.float32, seed=seed)
        student = replace(student, hidden_BTD=student.hidden_BTD * (0.01, 1, 30)[seed % 3])
        for kind, mix in KINDS:
            ours = loss_of(student, teacher, labels, Target(kind, 1.0, mix, top_k))
            assert ours.sum >= -1e-5 and torch.isfinite(ours.sum)
            grads = torch.autograd.grad(ours.sum, (student.hidden_BTD, student.weight_VD))
            assert all(torch.isfinite(g).all() for g in grads)


def test_property_55_temperature_is_on_both_sides_and_its_square_keeps_gradients():
    """posttraining-anchors, section 4, property 55; arXiv 1503.02531, section 2.1: for a high temperature the gradient
    goes to that of half the squared difference of centred logits, over the vocabulary."""
    student, teacher, labels = case()
    x_BTV, y_BTV = student.logits(), teacher.logits().detach()
    ours = loss_of(student, teacher, labels, Target("forward", 1e4))
    centred = [z - z.mean(-1, keepdim=True) for z in (x_BTV, y_BTV)]
    wanted = ((centred[0] - centred[1]).square().sum(-1) * (labels != IGNORE)).sum() / (2 * VOCAB)
    found = torch.autograd.grad(ours.sum, student.hidden_BTD)[0]
    torch.testing.assert_close(found, torch.autograd.grad(wanted, student.hidden_BTD)[0], rtol=1e-2, atol=1e-3)


def test_a_stored_teacher_gives_what_it_gives_online():
    student, teacher, labels = case()
    for kind, mix in KINDS:
        target = Target(kind, 1.5, mix, 4)
        columns = teacher_columns(teacher, labels, 4, 1.5, chunk_tokens=3)
        assert columns[IDS].shape == (*labels.shape, 5) and columns[LOGP].dtype == torch.float32
        assert (columns[IDS][labels == IGNORE] == 0).all() and (columns[IDS][labels != IGNORE][:, -1] == -1).all()
        stored = loss_of(student, teacher, labels, target, columns=columns)
        torch.testing.assert_close(stored.sum, loss_of(student, teacher, labels, target).sum, rtol=1e-6, atol=1e-6)


def test_nothing_of_a_row_without_a_target_counts():
    student, teacher, labels = case()
    nothing = torch.full_like(labels, IGNORE)
    ours = loss_of(student, teacher, nothing, Target())
    grads = torch.autograd.grad(ours.sum, (student.hidden_BTD, student.weight_VD))
    assert ours.sum == 0 and all(not g.any() for g in grads)


class _Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return found


@pytest.mark.parametrize("top_k", [0, 4])
def test_never_holds_the_logits(top_k):
    student, teacher, labels = case(torch.float32, rows=4, length=64, vocab=500)
    with _Largest() as largest:
        loss_of(student, teacher, labels, Target("reverse", 2.0, top_k=top_k), 0.5, chunk=32).sum.backward()
    assert largest.elements <= 16 * 500


def _split(rank: int, world: int):
    """On a vocabulary that is split unevenly."""
    student, teacher, labels = case()
    axis = Axis("tp", world, rank, torch.distributed.group.WORLD)
    first, stop = span(VOCAB, world, rank)
    found = []
    for kind, mix in KINDS:
        for top_k in (0, 4, 9):
            target = Target(kind, 1.5, mix, top_k)
            whole = loss_of(student, teacher, labels, target, 0.3)
            wanted = torch.autograd.grad(whole.sum, (student.hidden_BTD, student.weight_VD))
            parts = [
                replace(one, weight_VD=one.weight_VD[first:stop].detach().requires_grad_(), vocab=axis, first_row=first)
                for one in (student, teacher)
            ]
            ours = loss_of(*parts, labels, target, 0.3)
            torch.testing.assert_close(ours.sum, whole.sum, rtol=1e-10, atol=1e-10)
            hidden, weight = torch.autograd.grad(ours.sum, (student.hidden_BTD, parts[0].weight_VD))
            torch.distributed.all_reduce(hidden)
            torch.testing.assert_close([hidden, weight], [wanted[0], wanted[1][first:stop]], rtol=1e-9, atol=1e-10)
            found.append(ours.sum.item())
    return found


def test_a_split_vocabulary_changes_nothing():
    first, second, third = run_ranks(_split, 3)
    assert first == second == third


def test_likeliest_ids_and_the_rest():
    logp = torch.tensor([[0.1, 0.5, 0.15, 0.25]], dtype=torch.float64).log()
    ids, classes = likeliest(logp, 2, Axis("tp"), 0)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(classes.exp(), torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64))
