"""Preferences: of two answers which is better, or of one whether it is good, against a reference or without one.

With x the log-ratio of an answer, Σ_t log p(y_t) - log ref(y_t) over its targets, chosen c and rejected r, strength b
(beta), and m = b·(x_c - x_r), the difference of the rewards b·x:

    dpo                 -log σ(m)                                                        arXiv 2305.18290, equation 7
    robust              (-(1 - e)·log σ(m) + e·log σ(-m)) / (1 - 2e)                     arXiv 2403.00409, equation 12
    length-normalised   -log σ(m), x the mean over targets                               arXiv 2411.15124, equation 6
    ipo                 (m / b - 1 / (2b))², x the mean over targets                     arXiv 2310.12036, equation 17
    simpo               -log σ(m - g), x the mean of log p alone                         arXiv 2405.14734, equation 6
    kto                 good: w·(1 - σ(b·(x - z)));  bad: w·(1 - σ(b·(z - x)))           arXiv 2402.01306, section 4

The reference point z of KTO is max(0, the mean log-ratio of answers to prompts of others), as the paper estimates it;
but over one set of such pairs that stays the same (truestep.train.reference), not over those that happen to share a
microbatch. So z depends on the weights of the model alone, and on no batch; nothing is differentiated through it.

The optional cross-entropy of chosen (or good) answers is a mean over their targets (arXiv 2404.19733, section 2).

Log-ratios are taken token by token and added up in float64: where model and reference agree, every x is 0 to the last
bit, and what shares a batch with an answer changes nothing in its sums. All sums are over units, whose number divides.
"""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import logsigmoid

from truestep.errors import DataError, UserError
from truestep.losses.base import LossSum
from truestep.losses.log_probs import log_probs
from truestep.numerics.axis import Axis
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput, Logits, OwnLoss
from truestep.recipe.posttrain import Preference
from truestep.recipe.stage import Stage

REFERENCE = "reference"
MEANS = ("ipo", "length-normalised", "simpo")
"""Kinds that take the mean over an answer's targets; the others take the sum."""


@dataclass(frozen=True)
class Answers:
    """Sums over the targets of one answer of each of P units, float64: `logp_P` of the model, `ratio_P` to the
    reference (or `logp_P` again, without one), `count_P` of targets, and `kl_P`, Σ p/ref - 1 - log(p/ref), which is
    never negative, and is KL(reference, model) in expectation over answers of the reference. The first two have
    gradients. Where a number belongs to no unit, all are 0."""

    logp_P: torch.Tensor
    ratio_P: torch.Tensor
    count_P: torch.Tensor
    kl_P: torch.Tensor

    def mean(self, x_P: torch.Tensor) -> torch.Tensor:
        return x_P / self.count_P.clamp(min=1)


@dataclass
class PreferenceLoss:
    """Columns: unit, side, counted, and but for simpo reference. `point`: z, set anew before each step (kto).

    Metrics, sums over units: "reward_chosen", "reward_rejected", "margin" (their difference; kto: the reward of a good
    answer, minus that of a bad one), "accuracy" (of margins above 0; kto: above z), "ties" (margins of exactly 0),
    "logp_chosen", "logp_rejected" (sums over targets), "undefined" (units with an answer without a target, which have
    no loss). With a reference: "kl" (see Answers; pairs: of both answers, the mean) and "both_fell" (pairs, both of
    whose rewards are below 0). With sft: "nll", a mean over targets. kto: "good", the share of units that
    "reward_chosen" and "logp_chosen" are sums over, and "reference_point"."""

    section: Preference
    chunk_tokens: int
    point: float = field(default=0.0)

    def weight(self, batch: Batch) -> float:
        if self.needs_reference:
            reference_BT = batch.columns.get(REFERENCE)
            if reference_BT is not None and not reference_BT.isfinite().all():
                raise DataError(
                    "a stored log-probability of the reference is not a number; remove the run's stored columns (they "
                    "are made anew), and look at the model that the stage starts from if that does not help"
                )
        return float(batch.columns["counted"].sum())

    @property
    def needs_reference(self) -> bool:
        return self.section.kind != "simpo"

    def __call__(self, out: HeadInput | Logits | OwnLoss, batch: Batch) -> LossSum:
        chosen, rejected = self.answers(out, batch)
        unit_P = of_units(batch, batch.columns["counted"].double()[..., None], _places(out))[:, 0] > 0
        loss_P, figures = self._kto(chosen, rejected) if self.section.kind == "kto" else self._pairs(chosen, rejected)
        if self.section.sft:
            nll_P = -chosen.mean(chosen.logp_P)
            loss_P, figures["nll"] = loss_P + self.section.sft * nll_P, nll_P
        real_P = unit_P & figures.pop("defined")
        figures["undefined"] = (unit_P & ~real_P).double()
        # Every rank along the axis of places has the sums of whole answers; one of them tells.
        share = 1.0 if _places(out).rank == 0 else 0.0

        def total(x_P: torch.Tensor, where_P: torch.Tensor) -> torch.Tensor:
            return share * torch.where(where_P, x_P, 0.0).sum()

        metrics = {
            name: total(x_P.detach(), unit_P if name == "undefined" else real_P) for name, x_P in figures.items()
        }
        return LossSum(total(loss_P, real_P), metrics)

    def answers(self, out: HeadInput | Logits | OwnLoss, batch: Batch) -> tuple[Answers, Answers]:
        """The chosen (or good) and the rejected (or bad) answer of every unit; of units of one, the other is empty."""
        if isinstance(out, OwnLoss) or not isinstance(out, HeadInput | Logits):
            raise UserError(
                "preferences are of the log-probabilities of answers, but the model returns a loss of its own or "
                "scores; return logits."
            )
        logp_BT = log_probs(out, batch.labels_BT, self.chunk_tokens).double()
        ratio_BT = logp_BT - self._reference(batch) if self.needs_reference else logp_BT
        apart_BT = ratio_BT.detach()
        kl_BT = torch.expm1(apart_BT) - apart_BT
        real_BT = batch.labels_BT != IGNORE
        each_BTK = torch.stack([logp_BT, ratio_BT, torch.ones_like(kl_BT), kl_BT], dim=2) * real_BT[..., None]
        side_BT1 = batch.columns["side"][..., None]
        sums = [of_units(batch, each_BTK * (side_BT1 * side > 0), _places(out)) for side in (1, -1)]
        chosen, rejected = (Answers(*one.unbind(1)) for one in sums)
        return chosen, rejected

    def _reference(self, batch: Batch) -> torch.Tensor:
        if REFERENCE not in batch.columns:
            raise UserError(
                f"preference.kind {self.section.kind!r} compares with a reference, but the rows have no column "
                f"{REFERENCE!r}; build the stage from its recipe, which sees to it, or take simpo."
            )
        return batch.columns[REFERENCE].double()

    def _rewards(self, answers: Answers) -> torch.Tensor:
        mean = self.section.kind in MEANS
        return self.section.beta * (answers.mean(answers.ratio_P) if mean else answers.ratio_P)

    def _pairs(self, chosen: Answers, rejected: Answers) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        high_P, low_P = self._rewards(chosen), self._rewards(rejected)
        margin_P = high_P - low_P
        figures = _figures(high_P, low_P, margin_P, chosen, rejected)
        figures["defined"] = (chosen.count_P > 0) & (rejected.count_P > 0)
        if self.needs_reference:
            figures["kl"] = (chosen.kl_P + rejected.kl_P) / 2
            figures["both_fell"] = ((high_P < 0) & (low_P < 0)).double()
        return self._of_margin(margin_P), figures

    def _of_margin(self, margin_P: torch.Tensor) -> torch.Tensor:
        section = self.section
        if section.kind == "ipo":
            return (margin_P / section.beta - 1 / (2 * section.beta)).square()
        if section.kind == "simpo":
            return -logsigmoid(margin_P - section.margin)
        if section.kind == "robust":
            wrong = section.label_smoothing
            return (wrong * logsigmoid(-margin_P) - (1 - wrong) * logsigmoid(margin_P)) / (1 - 2 * wrong)
        return -logsigmoid(margin_P)

    def _kto(self, good: Answers, bad: Answers) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        section, is_good_P = self.section, good.count_P > 0
        high_P, low_P = self._rewards(good), self._rewards(bad)
        sign_P = torch.where(is_good_P, 1.0, -1.0).double()
        reward_P, point = high_P + low_P, section.beta * self.point
        weight_P = torch.where(is_good_P, section.desirable, section.undesirable).double()
        above_P = sign_P * (reward_P - point)
        figures = _figures(high_P, low_P, sign_P * reward_P, good, bad)
        figures |= {"accuracy": (above_P > 0).double(), "kl": good.kl_P + bad.kl_P, "good": is_good_P.double()}
        figures["defined"] = good.count_P + bad.count_P > 0
        figures["reference_point"] = torch.full_like(reward_P, self.point)
        return weight_P * torch.sigmoid(-above_P), figures


def of_stage(stage: Stage, chunk_tokens: int) -> PreferenceLoss:
    return PreferenceLoss(stage.preference, chunk_tokens)


def of_units(batch: Batch, x_BTK: torch.Tensor, places: Axis) -> torch.Tensor:
    """x_PK summed over the places of each unit of the batch, over all ranks along `places`, on every one of them. P is
    the most units that rows could hold; numbers that belong to none have 0."""
    rows, here = batch.tokens_BT.shape
    length = here if batch.documents_BT is None else batch.documents_BT.shape[1]  # of whole rows
    numbers_BT = batch.columns["unit"].long() + length * torch.arange(rows, device=x_BTK.device)[:, None]
    zeros_PK = x_BTK.new_zeros(rows * length, x_BTK.shape[2])
    return places.sum(zeros_PK.index_add(0, numbers_BT.flatten(), x_BTK.flatten(0, 1)))


def _places(out: HeadInput | Logits | OwnLoss) -> Axis:
    return out.places if isinstance(out, HeadInput) else Axis("cp")


def _figures(
    high_P: torch.Tensor, low_P: torch.Tensor, margin_P: torch.Tensor, chosen: Answers, rejected: Answers
) -> dict[str, torch.Tensor]:
    return {
        "reward_chosen": high_P,
        "reward_rejected": low_P,
        "margin": margin_P,
        "accuracy": (margin_P > 0).double(),
        "ties": (margin_P == 0).double(),
        "logp_chosen": chosen.logp_P,
        "logp_rejected": rejected.logp_P,
    }
