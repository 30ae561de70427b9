"""Routers: choice, weights, losses and counts against plain formulas."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.models.sections import VOCAB, small
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.models.router import Router
from truestep.recipe.moe import Moe

same: Callable[[torch.Tensor], torch.Tensor] = lambda x: x  # noqa: E731  the sum over one rank


def router(dtype: torch.dtype = torch.float64, has_bias: bool = False, **options: Any) -> Router:
    """Of 8 experts, 2 a token, on hidden states of 8."""
    given = {"num_experts": 8, "top_k": 2, "scoring": "softmax", "balance": "none"} | options
    made = Router(Moe(**given), 8, has_bias).to(dtype)
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(0)))
    return made


def tokens(count: int = 12, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("normalise", [False, True])
def test_c27_the_router_learns_unless_its_one_weight_is_always_one(normalise: bool):
    """Logits 2, 1, 0, top-1. Softmax over all experts: weight 0.665241 and a gradient. Made to sum to 1 (softmax after
    selection), it has none, and recipes refuse it."""
    chosen = Router(Moe(num_experts=3, top_k=1, scoring="softmax", normalise=normalise, balance="none"), 3, False)
    with torch.no_grad():
        chosen.weight.copy_(torch.eye(3))
    experts_NK, weights_NK = chosen(torch.tensor([[2.0, 1.0, 0.0]]))
    weights_NK.sum().backward()
    assert experts_NK.tolist() == [[0]] and chosen.weight.grad is not None
    assert weights_NK.item() == pytest.approx(1.0 if normalise else 0.665241, abs=1e-6)
    assert (chosen.weight.grad.abs().max() < 1e-7) == normalise


def test_weights_are_the_scores_of_the_chosen():
    x_ND = tokens()
    plain, scaled = router(normalise=False), router(scale=2.5)
    probs_NE = (x_ND @ plain.weight.T).softmax(-1)
    experts_NK, weights_NK = plain(x_ND)
    assert torch.equal(experts_NK, probs_NE.topk(2).indices)
    torch.testing.assert_close(weights_NK, probs_NE.topk(2).values)
    torch.testing.assert_close(scaled(x_ND)[1].sum(-1), torch.full((12,), 2.5, dtype=torch.float64))
    among = (x_ND @ scaled.weight.T).gather(1, experts_NK).softmax(-1)  # softmax after selection is the same
    torch.testing.assert_close(scaled(x_ND)[1], 2.5 * among)


def test_bias_moves_the_choice_and_not_the_weights():
    biased = router(has_bias=True, scoring="sigmoid", normalise=False)
    assert biased.bias is not None
    biased.bias[5] = 10.0
    experts_NK, weights_NK = biased(tokens())
    assert (experts_NK[:, 0] == 5).all()
    torch.testing.assert_close(weights_NK[:, 0], (tokens() @ biased.weight.T)[:, 5].sigmoid())


def test_groups_are_chosen_by_their_two_best():
    """Four groups of two: the first has the best expert, but the second and third have the better pairs."""
    grouped = router(groups=4, top_groups=2, top_k=3)
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.7, 0.35, 0.3, 0.2]])
    assert grouped.choose(scores).tolist() == [[4, 2, 3]]
    assert router(top_k=3).choose(scores).tolist() == [[0, 4, 2]]


def test_of_equal_scores_the_first_experts_are_chosen():
    even = router(top_k=3, groups=4, top_groups=2)
    assert even.choose(torch.full((500, 8), 0.5)).unique(dim=0).tolist() == [[0, 1, 2]]
    assert router(top_k=3).choose(torch.full((500, 8), 0.5)).unique(dim=0).tolist() == [[0, 1, 2]]


def test_it_stays_wide():
    """fp32 whatever the model is cast to, and under autocast; float64 stays."""
    for cast in (torch.bfloat16, torch.float16):
        narrow = router(torch.float32, has_bias=True).to(cast)
        assert {x.dtype for x in narrow.state_dict().values()} == {torch.float32}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, weights_NK = narrow(tokens().to(cast))
        assert weights_NK.dtype == torch.float32
        torch.testing.assert_close(weights_NK, router(torch.float32)(tokens().to(cast).float())[1])
    assert router()(tokens())[1].dtype == torch.float64


def gradient(given: Router, x_ND: torch.Tensor, count: int, tokens: int, real_N: torch.Tensor | None = None) -> Any:
    """Of the weight, by the losses of the router alone: the output's own gradient is 0. In `count` microbatches."""
    given.weight.grad = None
    given.begin(tokens, 1.0)
    reals = [None] * count if real_N is None else real_N.chunk(count)
    for part, real in zip(x_ND.chunk(count), reals):
        (given(part, real)[1] * 0.0).sum().backward()
    return given.weight.grad


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("count", [1, 3])
def test_balance_loss_goes_by_the_global_counts_of_the_step_before(scoring: str, count: int):
    """coefficient E sum_e f_e mean p_e; the same for every split into microbatches, and padding has no part in it."""
    balanced = router(scoring=scoring, balance="aux", balance_coefficient=0.5)
    balanced.load.copy_(torch.tensor([8, 1, 0, 3, 2, 4, 4, 2]))
    x_ND, real_N = tokens(), torch.arange(12) % 4 != 3
    found = gradient(balanced, x_ND, count, 9, real_N)
    weight = balanced.weight.detach().clone().requires_grad_()
    scores_NE = (x_ND[real_N] @ weight.T).softmax(-1) if scoring == "softmax" else (x_ND[real_N] @ weight.T).sigmoid()
    probs_E = (scores_NE / scores_NE.sum(-1, keepdim=True)).mean(0)
    (0.5 * 8 * (balanced.load.double() / 24 * probs_E).sum()).backward()
    torch.testing.assert_close(found, weight.grad, atol=1e-14, rtol=1e-12)


def test_without_counts_the_balance_loss_is_that_of_an_even_load():
    balanced = router(balance="aux")
    assert gradient(balanced, tokens(), 1, 12).abs().max() < 1e-16
    torch.testing.assert_close(balanced.balance_loss(torch.full((8,), 1 / 8)), torch.tensor(0.01))


def test_z_loss():
    """factor mean(logsumexp(logits)^2), on gradients times the scale of the step."""
    steep = router(z_loss=0.3)
    steep.begin(12, 1024.0)
    (steep(tokens())[1] * 0.0).sum().backward()
    weight = steep.weight.detach().clone().requires_grad_()
    (1024 * 0.3 * (tokens() @ weight.T).logsumexp(-1).square().mean()).backward()
    torch.testing.assert_close(steep.weight.grad, weight.grad)


def model(**moe: Any) -> Decoder:
    """Two blocks with experts of three."""
    given = {"num_experts": 6, "top_k": 2, "expert_size": 16, "dense_layers": 1} | moe
    made = build_model(small(family="qwen3_moe", moe=given), VOCAB).double().to_empty(device="cpu")
    init_weights(made, 0)
    assert isinstance(made, Decoder)
    return made


TOKENS_BT = torch.arange(14).view(2, 7) % VOCAB
DOCUMENTS_BT = torch.tensor([[0] * 4 + [1] * 3, [0] * 4 + [-1] * 3], dtype=torch.int32)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_counts_real_tokens_once(recomputed: bool):
    routed = model(z_loss=0.1)
    if recomputed:
        for block in routed.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    routed(TOKENS_BT, None, DOCUMENTS_BT)  # outside a step
    routed.begin_step(tokens=11)
    routed(TOKENS_BT, None, DOCUMENTS_BT).sum().backward()
    counts = {number: moe.router.counts.clone() for number, moe in routed.moes().items()}
    metrics = routed.end_step(same)
    routed(TOKENS_BT, None, DOCUMENTS_BT)
    assert list(counts) == [1, 2]
    for number, counted in counts.items():
        router = routed.moes()[number].router
        assert counted[:-1].sum() == 2 * 11 and counted[-1] == 3
        assert torch.equal(router.load, counted[:-1]) and torch.equal(router.counts, counted)
        mean = 22 / 6
        assert metrics[f"experts.{number}.load"] == pytest.approx(counted[:-1].max().item() / mean)
        assert 0 < metrics[f"experts.{number}.entropy"] <= torch.tensor(6.0).log().item() + 1e-12
        assert metrics[f"experts.{number}.balance_loss"] == pytest.approx(0.01, rel=1e-9)  # no load before this step
        assert metrics[f"experts.{number}.z_loss"] > 0
    assert metrics["experts.dropped"] == 0 and metrics["experts.padding"] == 2 * 3
    assert len(metrics) == 2 * 4 + 2


def test_losses_of_routers_reach_parameters_below_them():
    """Through the hidden states: their gradient is that of the losses added to the job's loss."""
    attached, added = model(z_loss=0.1), model(z_loss=0.1)
    for routed in (attached, added):
        for moe in routed.moes().values():
            moe.router.load.copy_(torch.tensor([5, 1, 2, 2, 1, 3]))
    attached.begin_step(tokens=14)
    attached(TOKENS_BT).sum().backward()
    seen: list[tuple[Router, torch.Tensor]] = []
    for moe in added.moes().values():
        moe.router.register_forward_hook(lambda _, args, __, own=moe.router: seen.append((own, args[0])))
    loss = added(TOKENS_BT).sum()
    for router, x_ND in seen:
        logits_NE = x_ND @ router.weight.T
        share_E = router.load.double() / 14
        loss = loss + 0.01 * 6 * (share_E * logits_NE.softmax(-1).mean(0)).sum()
        loss = loss + 0.1 * logits_NE.logsumexp(-1).square().mean()
    loss.backward()
    for (name, a), b in zip(attached.named_parameters(), added.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=1e-10, msg=name)


def test_a_pre_pass_gives_the_counts_of_this_step():
    routed = model(counts="pre-pass")
    assert routed.wants_pre_pass and not model().wants_pre_pass
    routed.begin_step(tokens=14)
    with torch.no_grad():
        routed(TOKENS_BT)
    routed.end_pre_pass(same)
    loads = [moe.router.load.clone() for moe in routed.moes().values()]
    assert all(load.sum() == 28 for load in loads)
    routed(TOKENS_BT).sum().backward()
    for load, moe in zip(loads, routed.moes().values()):
        assert torch.equal(load, moe.router.counts[:-1])
    assert "blocks.1.mlp.router.load" not in routed.state_dict()  # made anew in each step
    assert "blocks.1.mlp.router.load" in model().state_dict()


def test_two_ranks_count_together():
    """`sum_over` adds what the other rank counted: the load and the bias are those of one rank with all rows."""
    options = {"balance": "bias", "bias_rate": 0.125}
    whole, halves = model(**options), [model(**options) for _ in range(2)]
    for routed in (whole, *halves):
        routed.begin_step(tokens=14)
    whole(TOKENS_BT)
    for half, row in zip(halves, TOKENS_BT):
        half(row[None])
    stacks = [[], []]
    for half, stack in zip(halves, stacks):
        half.end_step(lambda x, stack=stack: stack.append(x.clone()) or x, update=False)
    for half, other in zip(halves, reversed(stacks)):
        half.begin_step(tokens=14)
        half(TOKENS_BT[halves.index(half)][None])
        mine = iter(other)
        half.end_step(lambda x, mine=mine: x + next(mine))
    wanted = whole.end_step(same)
    for number, moe in whole.moes().items():
        for half in halves:
            found = half.moes()[number].router
            assert torch.equal(found.load, moe.router.load)
            assert found.bias is not None and moe.router.bias is not None and torch.equal(found.bias, moe.router.bias)
    assert wanted["experts.padding"] == 0


def test_the_bias_rises_where_an_expert_is_chosen_too_seldom():
    """arXiv 2408.15664, algorithm 1; the mean, 21 / 8, is not a whole number. Where all are equal nothing moves."""
    steered = router(has_bias=True, balance="bias", bias_rate=0.5)
    steered.update(torch.tensor([2, 3, 0, 8, 2, 2, 2, 2]))
    assert steered.bias is not None
    assert steered.bias.tolist() == [0.5, -0.5, 0.5, -0.5, 0.5, 0.5, 0.5, 0.5]
    steered.update(torch.full((8,), 3))
    assert steered.bias.tolist() == [0.5, -0.5, 0.5, -0.5, 0.5, 0.5, 0.5, 0.5]
    fixed = router(has_bias=True, balance="aux")
    fixed.update(torch.arange(8))
    assert fixed.bias is not None and fixed.bias.tolist() == [0.0] * 8


def test_buffers_from_the_meta_device_start_at_zero():
    with torch.device("meta"):
        made = Router(Moe(num_experts=8, top_k=2, scoring="sigmoid", balance="bias"), 8, True)
    made.to_empty(device="cpu")
    assert all((buffer == 0).all() for buffer in made.buffers()) and len(list(made.buffers())) == 5
