"""A pull to the model that a stage starts from, beside the stage's own loss.

Of every target with the model's distribution q and that of the start p: w·KL(q, p), the divergence of what is trained
from what was there (the direction of arXiv 1909.08593, equation 2), over the whole vocabulary and not of the one token.
Targets weigh what they weigh in the stage's loss, so both are divided by the same number.
"""

from dataclasses import dataclass, field

import torch

from truestep.errors import UserError
from truestep.losses.base import Loss, LossSum
from truestep.losses.distill import ready, teacher_rows
from truestep.losses.divergence import divergence, log_softmax
from truestep.losses.fused import fused_loss
from truestep.numerics.batch import Batch
from truestep.numerics.head import HeadInput, Logits, OwnLoss

HIDDEN = "start_hidden"


@dataclass
class Remembering:
    """`inner`: the stage's loss; `kl`: w. The start's hidden states come as the column `start_hidden`, the output
    matrix that belongs to them as `head`. Metrics: those of `inner`, and "kl_to_start", the sum without w."""

    inner: Loss
    kl: float
    chunk_tokens: int
    head: HeadInput | None = field(default=None, repr=False)

    def weight(self, batch: Batch) -> int | float:
        return self.inner.weight(batch)

    def __call__(self, out: HeadInput | Logits | OwnLoss, batch: Batch) -> LossSum:
        if not isinstance(out, HeadInput):
            raise UserError(
                "remember.kl compares output distributions, which a model of your own does not give; set it to 0."
            )
        found, hidden_ND = self.inner(out, batch), batch.columns[HIDDEN].flatten(0, 1)
        head, weight_BT = ready(self.head, hidden_ND), batch.columns.get("weight")

        def of_rows(logits_CV: torch.Tensor, index_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logp_CV = teacher_rows(hidden_ND[index_C], head, temperature=1.0)
            value_C1, grad_CV = divergence(log_softmax(logits_CV, out.vocab), logp_CV, "reverse", add=out.vocab.sum_)
            if weight_BT is not None:
                each_C1 = weight_BT.reshape(-1, 1)[index_C].to(value_C1.dtype)
                value_C1, grad_CV = value_C1 * each_C1, grad_CV.mul_(each_C1)
            return torch.cat((self.kl * value_C1, value_C1), dim=1).T, grad_CV.mul_(self.kl)

        pull, (_, value) = fused_loss(out, batch.labels_BT, of_rows, 2, max(1, self.chunk_tokens // 2))
        return LossSum(found.sum + pull, {**found.metrics, "kl_to_start": value})
