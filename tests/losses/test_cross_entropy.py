"""The fused cross-entropy equals the plain one in value and gradients, and never holds the logits."""

import pytest
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from truestep.losses.cross_entropy import CrossEntropy, cross_entropy, linear_cross_entropy
from truestep.losses.token_nll import token_nll
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput, Logits

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def case(dtype=torch.float64, rows=3, length=7, width=5, vocab=11, ignored=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden_BTD = torch.randn(rows, length, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocab, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    labels_BT = torch.randint(vocab, (rows, length), generator=g)
    labels_BT.view(-1)[torch.randperm(rows * length, generator=g)[:ignored]] = IGNORE
    return hidden_BTD, weight_VD, labels_BT


def batch(labels_BT: torch.Tensor) -> Batch:
    zeros = torch.zeros_like(labels_BT)
    return Batch(zeros, labels_BT, zeros, zeros.int())


def plain(hidden_BTD, weight_VD, labels_BT, softcap=None, z_loss=0.0):
    return cross_entropy(HeadInput(hidden_BTD, weight_VD, softcap).logits(), labels_BT, z_loss)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    return bool((ours - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk, ignored", [(1, 4), (4, 0), (4, 4), (1000, 4)])
def test_equals_the_plain_one(dtype, softcap, z_loss, chunk, ignored):
    hidden, weight, labels = case(dtype, ignored=ignored)
    total, nll = linear_cross_entropy(hidden, weight, labels, softcap, z_loss, chunk)
    expected, expected_nll = plain(hidden, weight, labels, softcap, z_loss)
    assert total.dtype == dtype and close(total, expected, TOLERANCE[dtype])
    assert not nll.requires_grad and close(nll, expected_nll, TOLERANCE[dtype])
    ours = torch.autograd.grad(total / 17, (hidden, weight))
    theirs = torch.autograd.grad(expected / 17, (hidden, weight))
    assert all(close(a, b, TOLERANCE[dtype]) for a, b in zip(ours, theirs))


class _Again(torch.autograd.Function):
    """The fused loss as a function whose backward may run often, as gradcheck asks: each run makes it anew."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, options):
        ctx.save_for_backward(hidden, weight, labels)
        ctx.options = options
        return linear_cross_entropy(hidden, weight, labels, *options)[0]

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, labels = ctx.saved_tensors
        with torch.enable_grad():
            hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            total, _ = linear_cross_entropy(hidden, weight, labels, *ctx.options)
        return *torch.autograd.grad(total, (hidden, weight), grad), None, None


@pytest.mark.parametrize("options", [(None, 0.0, 4), (1.5, 0.0, 4), (None, 0.3, 4), (1.5, 0.3, 2)])
def test_gradients_are_the_derivatives(options):
    hidden, weight, labels = case(rows=2, length=3, width=2, vocab=4, ignored=1)
    assert torch.autograd.gradcheck(lambda h, w: _Again.apply(h, w, labels, options), (hidden, weight))


def test_bfloat16_is_as_near_to_the_truth_as_the_plain_one():
    hidden, weight, labels = case(torch.bfloat16, rows=4, length=32, width=16, vocab=50)
    truth = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(plain(*truth, labels)[0], truth)
    total, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=10)
    assert total.dtype == torch.float32
    ours = torch.autograd.grad(total, (hidden, weight))
    theirs = torch.autograd.grad(plain(hidden, weight, labels)[0], (hidden, weight))
    for a, b, right in zip(ours, theirs, exact):
        assert a.dtype == torch.bfloat16
        assert (a - right).norm() <= 1.2 * (b - right).norm()


def test_many_chunks_in_bfloat16_add_up_in_fp32():
    hidden, weight, labels = case(torch.bfloat16, rows=8, length=64, width=4, vocab=3, ignored=0)
    one = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_tokens=512)[0], weight)[0]
    many = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_tokens=1)[0], weight)[0]
    assert close(many.float(), one.float(), 2**-7)  # 512 additions in bfloat16 would be off by far more


def test_autocast_gives_the_dtypes_and_values_of_the_plain_one():
    hidden, weight, labels = case(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4)
        expected, _ = plain(hidden, weight, labels)
    assert total.dtype == torch.float32 and close(total, expected, 1e-6)
    for a, b in zip(torch.autograd.grad(total, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight))):
        assert a.dtype == torch.float32 and close(a, b, 2**-7)


def test_float16_keeps_its_range():
    hidden, weight, labels = case(torch.float16)
    total, _ = linear_cross_entropy(hidden, weight, labels)
    grads = torch.autograd.grad(total * 1024.0, (hidden, weight))
    assert all(g.dtype == torch.float16 and torch.isfinite(g).all() for g in grads)


def test_tied_embedding_gets_both_gradients():
    _, weight, labels = case()
    tokens = torch.randint(11, labels.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (
        torch.autograd.grad(loss(weight[tokens].tanh(), weight, labels)[0], weight)[0]
        for loss in (linear_cross_entropy, plain)
    )
    assert close(ours, theirs, 1e-12)


def test_frozen_parts_get_no_gradient():
    hidden, weight, labels = case()
    expected = torch.autograd.grad(plain(hidden, weight, labels)[0], (hidden, weight))
    total, _ = linear_cross_entropy(hidden, weight.detach(), labels)
    assert close(torch.autograd.grad(total, hidden)[0], expected[0], 1e-12)
    total, _ = linear_cross_entropy(hidden.detach(), weight, labels)
    assert close(torch.autograd.grad(total, weight)[0], expected[1], 1e-12)


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("grad", [True, False])
def test_never_holds_the_logits(grad):
    hidden, weight, labels = case(rows=8, length=16, width=5, vocab=100, ignored=20)
    with _Largest() as largest, torch.set_grad_enabled(grad):
        total, _ = linear_cross_entropy(hidden, weight, labels, softcap=3.0, z_loss=0.1, chunk_tokens=9)
        if grad:
            total.backward()
    assert largest.numel <= max(9 * 100, 8 * 16 * 5)


def test_second_backward_is_refused_in_words():
    hidden, weight, labels = case()
    total, _ = linear_cross_entropy(hidden, weight, labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward pass again"):
        total.backward()


def test_logits_of_a_foreign_model_give_the_same_loss():
    hidden, weight, labels = case()
    loss = CrossEntropy(z_loss=0.1, chunk_tokens=4)
    fused = loss(HeadInput(hidden, weight), batch(labels))
    ready = loss(Logits(linear(hidden, weight)), batch(labels))
    assert close(fused.sum, ready.sum, 1e-12) and close(fused.metrics["nll"], ready.metrics["nll"], 1e-12)
    assert loss.weight(batch(labels)) == 17


@pytest.mark.parametrize("out", [lambda h, w: HeadInput(h, w, 2.0), lambda h, w: Logits(HeadInput(h, w, 2.0).logits())])
def test_token_nll_is_the_loss_target_by_target(out):
    hidden, weight, labels = case(rows=5, length=200)
    nll_BT = token_nll(out(hidden, weight), labels)
    assert nll_BT.shape == labels.shape and (nll_BT[labels == IGNORE] == 0).all()
    assert close(nll_BT.sum(), plain(hidden, weight, labels, softcap=2.0)[0], 1e-12)


@pytest.mark.parametrize("z_loss, softcap", [(0.0, None), (0.1, 2.0)])
def test_c19_no_targets_is_zero_without_nan(z_loss, softcap):
    hidden, weight, labels = case(ignored=21)
    for out in (HeadInput(hidden, weight, softcap), Logits(HeadInput(hidden, weight, softcap).logits())):
        result = CrossEntropy(z_loss)(out, batch(labels))
        grads = torch.autograd.grad(result.sum, (hidden, weight))
        assert result.sum.item() == 0.0 and result.metrics["nll"].item() == 0.0
        assert all((g == 0).all() for g in grads)
    assert CrossEntropy().weight(batch(labels)) == 0


def test_c17_z_loss_is_summed_over_targets():
    # Zero hidden states: logits [0, 0], so log Z = ln 2; the padding has larger logits and must not enter.
    hidden = torch.zeros(1, 5, 1, dtype=torch.float64)
    hidden[0, 3:] = 7.0
    labels = torch.tensor([[0, 1, 0, IGNORE, IGNORE]])
    result = CrossEntropy(z_loss=1e-4)(HeadInput(hidden, torch.ones(2, 1, dtype=torch.float64)), batch(labels))
    z_loss = (result.sum - result.metrics["nll"]).item() / 3
    assert z_loss == pytest.approx(4.804530e-5, rel=1e-6)
