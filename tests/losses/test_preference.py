"""Losses of preferences: closed forms in float64, TRL's own code where it is installed, and the properties of section 4
of posttraining-anchors that concern them."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from truestep.errors import DataError, UserError
from truestep.losses.log_probs import log_probs
from truestep.losses.preference import PreferenceLoss
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import Logits, OwnLoss
from truestep.recipe.posttrain import Preference

VOCAB, CONTEXT = 11, 20
PAIRS = [(3, 2), (1, 4), (2, 2)]
"""Targets of the chosen and of the rejected answer of each pair; prompts have two tokens."""
KINDS = ["dpo", "ipo", "robust", "length-normalised", "simpo"]


def answers(sides, row=0, seed=0):
    """One row of `sides`: (unit, side, targets) one after the other. (logits, batch, [places with a target])."""
    g = torch.Generator().manual_seed(seed)
    shape = (1, CONTEXT)
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE)
    documents, unit = torch.full(shape, -1, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
    side, counted = torch.zeros(shape, dtype=torch.int8), torch.zeros(shape)
    at, places, seen = 0, [], set()
    for number, (which, sign, targets) in enumerate(sides):
        here = slice(at, at + 2 + targets)
        documents[0, here], unit[0, here], side[0, here] = number, which, sign
        labels[0, at + 1 : at + 1 + targets] = torch.randint(VOCAB, (targets,), generator=g)
        counted[0, at] = which not in seen
        seen.add(which)
        places.append([(row, place) for place in range(at + 1, at + 1 + targets)])
        at += 2 + targets
    assert at <= CONTEXT
    logits = 2 * torch.randn(*shape, VOCAB, generator=g, dtype=torch.float64)
    reference = torch.where(labels == IGNORE, 0.0, -3 * torch.rand(shape, generator=g, dtype=torch.float64))
    columns = {"unit": unit, "side": side, "counted": counted, "reference": reference}
    return logits, Batch(tokens, labels, tokens, documents, columns), places


def stacked(rows):
    """Rows as one batch; places with a target, answer by answer."""
    batch = rows[0][1].map(lambda *parts: torch.cat(parts), *[row[1] for row in rows[1:]])
    logits = torch.cat([row[0] for row in rows]).requires_grad_()
    return logits, batch, [places for row in rows for places in row[2]]


def pairs():
    """Three pairs, two of them in one row."""
    (a, b), (c, d), (e, f) = PAIRS
    return stacked(
        [answers([(0, 1, a), (0, -1, b), (1, 1, e), (1, -1, f)], 0, 1), answers([(0, 1, c), (0, -1, d)], 1, 2)]
    )


def loss_of(kind, **options):
    return PreferenceLoss(Preference(kind=kind, **options), chunk_tokens=4)


def sums(logits, batch, places):
    """By hand: (Σ log p, Σ log-ratio, targets) of each answer."""
    logp = logits.log_softmax(-1)
    found = []
    for here in places:
        mine = torch.stack([logp[row, at, batch.labels_BT[row, at]] for row, at in here])
        reference = torch.stack([batch.columns["reference"][row, at] for row, at in here])
        found.append((mine.sum(), (mine - reference).sum(), len(here)))
    return found


def closed(kind, chosen, rejected, beta, margin=0.0, smoothing=0.0):
    (logp_c, x_c, n_c), (logp_r, x_r, n_r) = chosen, rejected

    def s(m):
        return 1 / (1 + torch.exp(-m))

    return {
        "dpo": lambda: -torch.log(s(beta * (x_c - x_r))),
        "ipo": lambda: (x_c / n_c - x_r / n_r - 1 / (2 * beta)) ** 2,
        "robust": lambda: (
            (-(1 - smoothing) * torch.log(s(beta * (x_c - x_r))) + smoothing * torch.log(s(-beta * (x_c - x_r))))
            / (1 - 2 * smoothing)
        ),
        "length-normalised": lambda: -torch.log(s(beta * (x_c / n_c - x_r / n_r))),
        "simpo": lambda: -torch.log(s(beta * (logp_c / n_c - logp_r / n_r) - margin)),
    }[kind]()


OPTIONS = {"robust": {"label_smoothing": 0.2}, "simpo": {"margin": 0.3}}


@pytest.mark.parametrize("sft", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_formula(kind, sft):
    logits, batch, places = pairs()
    options = OPTIONS.get(kind, {})
    found = loss_of(kind, beta=0.4, sft=sft, **options)(Logits(logits), batch)
    by_hand = sums(logits, batch, places)
    named = {"smoothing": options.get("label_smoothing", 0.0), "margin": options.get("margin", 0.0)}
    each = [
        closed(kind, c, r, 0.4, **named) - sft * c[0] / c[2] for c, r in zip(by_hand[::2], by_hand[1::2], strict=True)
    ]
    wanted = torch.stack(each).sum()
    torch.testing.assert_close(found.sum, wanted, rtol=1e-12, atol=0)
    ours, theirs = torch.autograd.grad(found.sum, logits)[0], torch.autograd.grad(wanted, logits)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-15)
    assert loss_of(kind).weight(batch) == 3.0


@pytest.mark.parametrize("point", [0.0, 0.35])
def test_kto_equals_the_formula(point):
    """arXiv 2402.01306, section 4, with weights that differ."""
    logits, batch, places = stacked([answers([(0, 1, 3), (1, -1, 2), (2, 1, 1)], 0), answers([(0, -1, 4)], 1, 5)])
    loss = loss_of("kto", beta=0.4, desirable=1.5, undesirable=0.5)
    loss.point = point
    found = loss(Logits(logits), batch)
    by_hand, signs = sums(logits, batch, places), [1, -1, 1, -1]
    wanted = sum(
        (1.5 if sign > 0 else 0.5) * (1 - torch.sigmoid(sign * 0.4 * (x - point)))
        for (_, x, _), sign in zip(by_hand, signs, strict=True)
    )
    torch.testing.assert_close(found.sum, wanted, rtol=1e-12, atol=0)
    ours, theirs = torch.autograd.grad(found.sum, logits)[0], torch.autograd.grad(wanted, logits)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-15)
    rewards = [0.4 * x.item() for _, x, _ in by_hand]
    expected = {
        "reward_chosen": rewards[0] + rewards[2],
        "reward_rejected": rewards[1] + rewards[3],
        "margin": rewards[0] - rewards[1] + rewards[2] - rewards[3],
        "good": 2.0,
        "reference_point": 4 * point,
        "accuracy": float(sum(sign * (r - 0.4 * point) > 0 for r, sign in zip(rewards, signs))),
    }
    assert {name: found.metrics[name].item() for name in expected} == pytest.approx(expected, rel=1e-12)


def test_property_15_both_rewards_are_logged_and_both_falling_is_told():
    """posttraining-anchors, section 4, property 15. Sums over pairs."""
    logits, batch, places = pairs()
    batch.columns["reference"].zero_()  # which was certain of every answer, so all of them fell
    found = {name: x.item() for name, x in loss_of("dpo", beta=0.4)(Logits(logits), batch).metrics.items()}
    by_hand = sums(logits, batch, places)
    chosen, rejected = ([0.4 * x.item() for _, x, _ in by_hand[first::2]] for first in (0, 1))
    assert found["reward_chosen"] == pytest.approx(sum(chosen)) and found["reward_rejected"] == pytest.approx(
        sum(rejected)
    )
    assert found["margin"] == pytest.approx(sum(chosen) - sum(rejected))
    assert found["accuracy"] == sum(c > r for c, r in zip(chosen, rejected))
    assert found["both_fell"] == 3.0 and found["undefined"] == found["ties"] == 0.0
    assert found["logp_chosen"] == pytest.approx(sum(logp.item() for logp, _, _ in by_hand[::2]))
    apart = [float(torch.expm1(x_t) - x_t) for here in places for x_t in _ratios(logits, batch, here)]
    assert found["kl"] == pytest.approx(sum(apart) / 2) and found["kl"] > 0


def test_property_15_one_reward_that_falls_is_not_both():
    logits, batch, places = pairs()
    reference, uniform = batch.columns["reference"], torch.zeros_like(logits)  # log p = -ln V everywhere
    reference.copy_(torch.where(batch.labels_BT == IGNORE, 0.0, -5.0))
    for answer in (1, 2, 4, 5):  # of the pairs one fell in the rejected answer, one in the chosen one, one in both
        for at in places[answer]:
            reference[at] = -0.1
    assert loss_of("dpo")(Logits(uniform), batch).metrics["both_fell"] == 1


def _ratios(logits, batch, here):
    logp = logits.detach().log_softmax(-1)
    return [logp[row, at, batch.labels_BT[row, at]] - batch.columns["reference"][row, at] for row, at in here]


@pytest.mark.parametrize("kind", ["dpo", "robust", "length-normalised"])
def test_property_11_a_model_that_is_its_reference_loses_ln_2(kind):
    """posttraining-anchors, section 4, property 11: 0.693147. Every bit, with log-probabilities in float32."""
    logits, batch, _ = pairs()
    logits = logits.detach().float()
    loss = loss_of(kind, **OPTIONS.get(kind, {}))
    column = log_probs(Logits(logits), batch.labels_BT, 4)
    assert column.dtype == torch.float32
    same = replace(batch, columns={**batch.columns, "reference": column})
    found = loss(Logits(logits), same)
    assert found.sum.item() == pytest.approx(3 * math.log(2), rel=1e-15)
    rewards = [found.metrics[name].item() for name in ("reward_chosen", "reward_rejected", "margin", "kl")]
    assert rewards == [0.0] * 4 and found.metrics["ties"] == 3


def test_property_12_sums_for_dpo_means_for_ipo_and_simpo():
    """posttraining-anchors, section 4, property 12: twice the tokens, each with the same log-ratio, double DPO's reward
    and leave the others alone."""
    rewards = {}
    for kind in KINDS:
        loss, found = loss_of(kind, **OPTIONS.get(kind, {})), []
        for targets in (2, 4):
            logits, batch, _ = stacked([answers([(0, 1, targets), (0, -1, 2)])])
            flat = torch.zeros_like(logits)  # log p = -ln V everywhere
            column = torch.where(batch.labels_BT == IGNORE, 0.0, -0.5).double()
            found.append(loss(Logits(flat), replace(batch, columns={**batch.columns, "reference": column})))
        rewards[kind] = found[1].metrics["reward_chosen"].item() / found[0].metrics["reward_chosen"].item()
    assert rewards == pytest.approx(
        {"dpo": 2.0, "robust": 2.0, "ipo": 1.0, "length-normalised": 1.0, "simpo": 1.0}, rel=1e-12
    )


@pytest.mark.parametrize("kind", [*KINDS, "kto"])
def test_property_12_padding_and_batch_mates_change_nothing(kind):
    """posttraining-anchors, section 4, property 12: alone, with padding rows, with others in the row: the same bits."""
    loss = loss_of(kind, beta=0.3, **OPTIONS.get(kind, {}))
    sides = [[(0, 1, 3), (0, -1, 2)], [(0, 1, 1), (0, -1, 4)]] if kind != "kto" else [[(0, 1, 3)], [(0, -1, 4)]]
    rows = [answers(side, number, number) for number, side in enumerate(sides)]
    alone = [loss(Logits(row[0]), row[1]).sum for row in rows]
    logits, batch, _ = stacked([*rows, *rows])
    empty = batch.without_targets()
    padded = batch.map(lambda *parts: torch.cat(parts), empty)
    assert loss(Logits(torch.cat([logits, logits])), padded).sum == sum([*alone, *alone])
    assert loss.weight(padded) == 4
    nothing = loss(Logits(logits), empty)
    assert nothing.sum == 0 and not torch.autograd.grad(nothing.sum, logits)[0].any()
    assert all(value == 0 for value in nothing.metrics.values()) and loss.weight(empty) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_property_13_swapping_negates_the_margin_exactly(kind):
    """posttraining-anchors, section 4, property 13."""
    loss = loss_of(kind, beta=0.3, **OPTIONS.get(kind, {}))
    logits, batch, _ = pairs()
    other = replace(batch, columns={**batch.columns, "side": -batch.columns["side"]})
    a, b = (loss(Logits(logits), one).metrics for one in (batch, other))
    assert a["margin"] == -b["margin"] != 0
    assert a["reward_chosen"] == b["reward_rejected"] and a["accuracy"] + b["accuracy"] == 3


def test_an_answer_without_a_target_is_counted_and_teaches_nothing():
    logits, batch, places = stacked([answers([(0, 1, 3), (0, -1, 2), (1, 1, 2)])])
    found = loss_of("dpo", beta=0.4)(Logits(logits), batch)
    assert found.metrics["undefined"] == 1 and loss_of("dpo").weight(batch) == 2
    torch.testing.assert_close(found.sum, closed("dpo", *sums(logits, batch, places)[:2], 0.4), rtol=1e-12, atol=0)
    (row, first), (grad,) = places[2][0], torch.autograd.grad(found.sum, logits)
    assert not grad[row, first:].any() and grad[row, :first].any()


def test_a_reference_that_is_not_a_number_is_one_sentence():
    _, batch, _ = pairs()
    batch.columns["reference"][0, 3] = math.nan
    with pytest.raises(DataError, match="log-probability of the reference is not a number"):
        loss_of("dpo").weight(batch)
    assert loss_of("simpo").weight(batch) == 3.0


def test_a_missing_reference_is_one_sentence():
    logits, batch, _ = pairs()
    without = replace(batch, columns={name: x for name, x in batch.columns.items() if name != "reference"})
    with pytest.raises(UserError, match="no column 'reference'"):
        loss_of("dpo")(Logits(logits), without)
    assert loss_of("simpo")(Logits(logits), without).sum > 0


def test_a_model_with_a_loss_of_its_own_is_refused():
    _, batch, _ = pairs()
    with pytest.raises(UserError, match="return logits"):
        loss_of("dpo")(OwnLoss(torch.zeros(())), batch)


class TestAgainstTrl:
    """TRL's DPOTrainer computes the loss, given our log-probabilities (as its fused head would give them)."""

    @pytest.mark.parametrize(
        "kind, theirs",
        [("dpo", "sigmoid"), ("ipo", "ipo"), ("robust", "robust"), ("length-normalised", "sigmoid_norm")],
    )
    def test_losses_and_rewards(self, kind, theirs):
        trl = pytest.importorskip("trl", reason="TRL is not installed: its losses are not compared with ours")
        rows = [answers([(0, 1, c), (0, -1, r)], number, number) for number, (c, r) in enumerate(PAIRS)]
        logits, batch, places = stacked(rows)
        found = loss_of(kind, beta=0.4, **OPTIONS.get(kind, {}))(Logits(logits), batch)
        loss, metrics = _trl(trl.DPOTrainer, theirs, logits, batch, places)
        assert found.sum.item() / 3 == pytest.approx(loss, rel=1e-6)
        if kind in ("dpo", "robust"):
            for ours, name in (("reward_chosen", "chosen"), ("reward_rejected", "rejected"), ("margin", "margins")):
                assert found.metrics[ours].item() / 3 == pytest.approx(metrics[f"rewards/{name}"], rel=1e-6)
            assert found.metrics["accuracy"].item() / 3 == pytest.approx(metrics["rewards/accuracies"])


def _trl(trainer, loss_type, logits, batch, places):
    """(loss, metrics) of trainer._compute_loss, on a stand-in for its model and settings: a row for each answer,
    chosen ones first."""
    longest = max(len(here) for here in places)
    order = [*places[::2], *places[1::2]]
    logp, reference = (torch.zeros(len(order), longest, dtype=torch.float64) for _ in range(2))
    logprobs = logits.detach().log_softmax(-1)
    for number, here in enumerate(order):
        for place, (row, at) in enumerate(here):
            logp[number, place] = logprobs[row, at, batch.labels_BT[row, at]]
            reference[number, place] = batch.columns["reference"][row, at]
    mask = torch.tensor([[0] + [1] * len(here) + [0] * (longest - len(here)) for here in order])
    out = SimpleNamespace(
        log_probs=logp,
        entropy=torch.zeros_like(logp),
        mean_logits=torch.zeros_like(logp),
        is_top1=torch.zeros_like(logp, dtype=torch.bool),
    )
    gathered = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x)
    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=gathered,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=0.4,
        label_smoothing=0.2,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    sums = reference.sum(1).chunk(2)
    inputs = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": sums[0],
        "ref_rejected_logps": sums[1],
    }
    loss = trainer._compute_loss(stand_in, lambda **_: out, inputs, return_outputs=False)
    return float(loss), {name: values[0] for name, values in stand_in._metrics["train"].items()}
