"""Log-probabilities of labels: equal to plain torch in float64, in value and gradient; split over ranks; never all
logits."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist import run_ranks
from truestep.losses.log_probs import log_probs
from truestep.numerics.axis import Axis
from truestep.numerics.batch import IGNORE
from truestep.numerics.head import HeadInput, Logits
from truestep.numerics.pieces import span

VOCAB = 13


def case(dtype=torch.float64, rows=2, length=6, width=4, seed=0, softcap=None):
    """(head, labels, what the gradient is asked of), every fourth place without a label."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (2 * torch.randn(VOCAB, width, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    labels_BT = torch.randint(VOCAB, (rows, length), generator=g)
    labels_BT.view(-1)[::4] = IGNORE
    asked_BT = torch.randn(rows, length, generator=g, dtype=torch.float64)
    return HeadInput(hidden, weight, softcap, vocab_size=VOCAB), labels_BT, asked_BT


def plain(out: HeadInput, labels_BT: torch.Tensor) -> torch.Tensor:
    logp_BT = out.logits().log_softmax(-1).gather(2, labels_BT.clamp(min=0)[..., None])[..., 0]
    return logp_BT.masked_fill(labels_BT == IGNORE, 0.0)


def gradients(logp_BT: torch.Tensor, out: HeadInput, asked_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((logp_BT * asked_BT).sum(), (out.hidden_BTD, out.weight_VD))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_equal_to_plain_torch_in_float64(softcap, chunk):
    out, labels, asked = case(softcap=softcap)
    ours, theirs = log_probs(out, labels, chunk), plain(out, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
    assert (ours[labels == IGNORE] == 0).all()
    for a, b in zip(gradients(ours, out, asked), gradients(theirs, out, asked), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap):
    out, labels, _ = case(rows=1, length=5, width=3, softcap=softcap)
    assert torch.autograd.gradcheck(
        lambda h, w: log_probs(replace(out, hidden_BTD=h, weight_VD=w), labels, 2), (out.hidden_BTD, out.weight_VD)
    )


def test_finished_logits_give_the_same():
    out, labels, asked = case()
    ours = log_probs(Logits(out.logits()), labels, 4)
    torch.testing.assert_close(ours, plain(out, labels), rtol=1e-13, atol=1e-14)
    for a, b in zip(gradients(ours, out, asked), gradients(plain(out, labels), out, asked), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_backward_pass_may_run_again():
    """As zero-bubble pipelines do, for inputs and for weights."""
    out, labels, asked = case()
    total = (log_probs(out, labels, 4) * asked).sum()
    first = torch.autograd.grad(total, out.hidden_BTD, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(total, out.hidden_BTD, retain_graph=True)[0])
    torch.testing.assert_close(
        torch.autograd.grad(total, out.weight_VD)[0], gradients(plain(out, labels), out, asked)[1], rtol=1e-12, atol=0
    )


def test_no_label_gives_zeros_and_zero_gradients():
    out, labels, asked = case()
    logp = log_probs(out, torch.full_like(labels, IGNORE), 4)
    assert not logp.any() and not any(grad.any() for grad in gradients(logp, out, asked))


def test_under_autocast_sums_are_wide():
    """Products in bfloat16, as the cross-entropy has them; everything after in float32."""
    out, labels, asked = case(torch.float32, length=64, width=32)
    with torch.autocast("cpu", torch.bfloat16):
        logp = log_probs(out, labels, 7)
    assert logp.dtype == torch.float32
    rounded = replace(out, hidden_BTD=out.hidden_BTD.bfloat16(), weight_VD=out.weight_VD.bfloat16())
    torch.testing.assert_close(logp, plain(rounded, labels), rtol=1e-5, atol=1e-5)
    grads, wanted = gradients(logp, out, asked), gradients(plain(out, labels), out, asked)
    assert all(grad.dtype == torch.float32 for grad in grads)
    assert all(((a - b).norm() / b.norm()) < 0.02 for a, b in zip(grads, wanted))


class Largest(TorchDispatchMode):
    """Most elements of any tensor with a dimension of the vocabulary's size."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.ndim >= 2 and found.shape[-1] == VOCAB:
            self.rows = max(self.rows, found.numel() // VOCAB)
        return found


def test_never_all_logits():
    out, labels, asked = case(length=40)
    with Largest() as seen:
        gradients(log_probs(out, labels, 5), out, asked)
    assert 0 < seen.rows <= 5


def _split(rank: int, world: int, chunk: int, softcap):
    import torch.distributed as dist

    out, labels, asked = case(softcap=softcap)
    axis = Axis("tp", world, rank, dist.group.WORLD)
    first, stop = span(VOCAB, world, rank)
    mine = replace(out, weight_VD=out.weight_VD.detach()[first:stop].requires_grad_(), vocab=axis, first_row=first)
    logp = log_probs(mine, labels, chunk)
    return logp.detach(), *gradients(logp, mine, asked)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("world", [2, 3])
def test_split_over_the_vocabulary(world, softcap):
    """13 rows divide by neither; each rank has its share of the hidden states' gradient."""
    out, labels, asked = case(softcap=softcap)
    wanted = plain(out, labels)
    grad_hidden, grad_weight = gradients(wanted, out, asked)
    found = run_ranks(_split, world, 4, softcap)
    for logp, *_ in found:
        torch.testing.assert_close(logp, wanted.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(sum(one[1] for one in found), grad_hidden, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(torch.cat([one[2] for one in found]), grad_weight, rtol=1e-11, atol=1e-13)
