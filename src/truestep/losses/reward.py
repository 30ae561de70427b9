"""Reward models: one score of an answer, or of each of its steps.

pairs (Bradley and Terry 1952): of a pair with scores c and r of the chosen and the rejected answer and a margin m
(arXiv 2307.09288, equation 2; 0 without), loss = -log sigmoid(c - r - m) + w·(c + r)², the last term keeping scores
near 0 (arXiv 2312.09244, section 2). The score of an answer is read at its last token, whatever lies around it.

steps (process rewards, arXiv 2305.20050): of a step with score s, read at its last token, and label y between 0 and 1,
loss = -y·log sigmoid(s) - (1 - y)·log sigmoid(-s).
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from truestep.errors import UserError
from truestep.losses.base import LossSum
from truestep.numerics.batch import Batch
from truestep.numerics.head import HeadInput, Logits, OwnLoss, Scores
from truestep.recipe.stage import Stage

Out = HeadInput | Logits | OwnLoss | Scores


@dataclass(frozen=True)
class Pairs:
    """Columns: unit, side, counted, and value for the margin. Metrics, sums over pairs: "accuracy", "margin" (c - r),
    "score" (of both answers, the mean)."""

    margins: bool = False
    center: float = 0.0

    def weight(self, batch: Batch) -> float:
        return float(batch.columns["counted"].sum())

    def __call__(self, out: Out, batch: Batch) -> LossSum:
        scores_BT = _scores(out)
        side_BT, unit_BT = batch.columns["side"], batch.columns["unit"].long()
        ends_BT = last_places(batch) & (side_BT != 0)
        rows, length = side_BT.shape
        numbers_BT = unit_BT + length * torch.arange(rows, device=unit_BT.device)[:, None]

        def of_pairs(x_BT: torch.Tensor) -> torch.Tensor:
            """Sums over the ends of each pair, by the pair's number in the batch; 0 where no pair has the number."""
            at_ends = (x_BT * ends_BT).flatten()
            return at_ends.new_zeros(rows * length).index_add(0, numbers_BT.flatten(), at_ends)

        margin_P, total_P = of_pairs(scores_BT * side_BT), of_pairs(scores_BT)
        is_pair_P = of_pairs(ends_BT.to(scores_BT.dtype)) > 0
        wanted_P = of_pairs(batch.columns["value"] * (side_BT > 0)) if self.margins else 0.0
        loss_P = -logsigmoid(margin_P - wanted_P)
        if self.center:
            loss_P = loss_P + self.center * total_P.square()
        figures = {"accuracy": (margin_P > 0).to(loss_P.dtype), "margin": margin_P, "score": total_P / 2}
        return LossSum((loss_P * is_pair_P).sum(), {n: (x * is_pair_P).sum().detach() for n, x in figures.items()})


@dataclass(frozen=True)
class Steps:
    """Column: value, the label of a step at its last token, NaN elsewhere. Metrics, sums over steps: "accuracy",
    "score"."""

    def weight(self, batch: Batch) -> int:
        return int(_labelled(batch).sum())

    def __call__(self, out: Out, batch: Batch) -> LossSum:
        scores_BT, labelled_BT = _scores(out), _labelled(batch)
        label_BT = batch.columns["value"].to(scores_BT.dtype).nan_to_num()
        loss_BT = binary_cross_entropy_with_logits(scores_BT, label_BT, reduction="none")
        hit_BT = ((scores_BT > 0) == (label_BT > 0.5)).to(scores_BT.dtype)
        figures = {"accuracy": hit_BT, "score": scores_BT}
        metrics = {name: (x_BT * labelled_BT).sum().detach() for name, x_BT in figures.items()}
        return LossSum((loss_BT * labelled_BT).sum(), metrics)


def of_stage(stage: Stage, chunk_tokens: int) -> Pairs | Steps:
    del chunk_tokens  # one number a token: nothing to hold back
    return Pairs(stage.reward.margins, stage.reward.center) if stage.reward.kind == "pairs" else Steps()


def last_places(batch: Batch) -> torch.Tensor:
    """Where a document's last token lies (B, T): known from the documents, never from ids, so that an end-of-text token
    inside of an answer, or one that pads, is nothing special."""
    tokens_BT, documents_BT = batch.tokens_BT, batch.documents_BT
    last_B1 = torch.ones_like(tokens_BT[:, :1], dtype=torch.bool)
    if documents_BT is None:
        return torch.cat([torch.zeros_like(tokens_BT[:, 1:], dtype=torch.bool), last_B1], dim=1)
    return torch.cat([documents_BT[:, 1:] != documents_BT[:, :-1], last_B1], dim=1) & (documents_BT >= 0)


def _labelled(batch: Batch) -> torch.Tensor:
    labelled_BT = ~batch.columns["value"].isnan()
    return labelled_BT if batch.documents_BT is None else labelled_BT & (batch.documents_BT >= 0)


def _scores(out: Out) -> torch.Tensor:
    if not isinstance(out, Scores):
        raise UserError(
            "a reward loss needs a model with a score head, but this one has none; take kind = reward_model."
        )
    return out.scores_BT.to(torch.promote_types(out.scores_BT.dtype, torch.float32))
