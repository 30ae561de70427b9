"""Supervised fine-tuning: the cross-entropy of the tokens that the assistant made.

By token, the loss of a step is the mean over its targets. By sample, it is the mean over its samples of the mean over
their targets: with n_s targets in sample s, Σ_s (1 / n_s) Σ_t nll_st, divided by the number of samples. The column
`weight` holds 1 / n_s at the places with a target, `counted` is 1 at one place of each sample.
"""

from dataclasses import dataclass

from truestep.losses.base import LossSum
from truestep.losses.cross_entropy import CrossEntropy
from truestep.numerics.batch import Batch
from truestep.numerics.head import HeadInput, Logits, OwnLoss
from truestep.recipe.stage import Stage


@dataclass(frozen=True)
class BySample:
    """Cross-entropy with a weight for each target. Metrics: "nll", the weighted sum without the z-loss."""

    each: CrossEntropy

    def weight(self, batch: Batch) -> float:
        return float(batch.columns["counted"].sum())

    def __call__(self, out: HeadInput | Logits | OwnLoss, batch: Batch) -> LossSum:
        return self.each.weighted(out, batch, batch.columns["weight"])


def of_stage(stage: Stage, chunk_tokens: int) -> CrossEntropy | BySample:
    loss = CrossEntropy(stage.loss.z_loss, chunk_tokens)
    return BySample(loss) if stage.sft.weighting == "sample" else loss
