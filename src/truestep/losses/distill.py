"""Distillation from a teacher's logits (arXiv 1503.02531), fused with the output matrices of both models.

Of a target with student logits x, teacher logits y, temperature T and share h of plain cross-entropy, with
q = softmax(x / T) and p = softmax(y / T): loss = (1 - h)·T²·D(p, q) + h·CE(x, label), where D is a divergence (see
truestep.losses.divergence) of the whole vocabulary, or of the teacher's k likeliest tokens and all others as one. The
gradient of T²·D by x is T times that of D by x / T, so it does not fade as the temperature rises.

The teacher comes as columns of a batch: `teacher_hidden`, the states before its own output matrix, which makes its
logits a few rows at a time as well; or stored, `teacher_ids` (last -1: all others) and `teacher_logp` of log p. At a
place they are about its label. Labels are those of the data: nothing here trains on what the student has sampled.
"""

from dataclasses import dataclass, field, replace

import torch

from truestep.errors import UserError
from truestep.losses.base import LossSum
from truestep.losses.divergence import NEVER, Kind, divergence, likeliest, log_softmax, others, own_rows, picked
from truestep.losses.fused import fused_loss, logits_of
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput, Logits, OwnLoss
from truestep.recipe.stage import Stage

HIDDEN, IDS, LOGP = "teacher_hidden", "teacher_ids", "teacher_logp"


@dataclass(frozen=True)
class Target:
    """What the student is compared by: the divergence, its temperature, the teacher's weight in the mixture of js, how
    many of the teacher's tokens are looked at (0: all)."""

    kind: Kind = "forward"
    temperature: float = 1.0
    mix: float = 0.5
    top_k: int = 0


@dataclass
class Distillation:
    """`head`: the teacher's output matrix, as whoever gives the column of its hidden states has last seen it (the
    states themselves left out). Metrics, sums over targets: "divergence" in nats without the factor T², and "nll" of
    the labels at temperature 1."""

    target: Target
    hard: float = 0.0
    chunk_tokens: int = 1024
    head: HeadInput | None = field(default=None, repr=False)

    def weight(self, batch: Batch) -> int:
        return batch.num_targets

    def __call__(self, out: HeadInput | Logits | OwnLoss, batch: Batch) -> LossSum:
        if not isinstance(out, HeadInput):
            raise UserError(
                "distillation takes the last hidden states and the output matrix of a student; a model of your own "
                "that returns logits or a loss cannot be one."
            )
        # logits of two models at a time, so half as many rows
        rows, chunk = _Rows(self, out, batch), max(1, self.chunk_tokens // 2)
        total, (_, nll, value) = fused_loss(out, batch.labels_BT, rows, 3, chunk)
        return LossSum(total, {"nll": nll, "divergence": value})


def of_stage(stage: Stage, chunk_tokens: int) -> Distillation:
    section = stage.distill
    assert section is not None
    target = Target(section.divergence, section.temperature, section.mix, section.top_k)
    return Distillation(target, section.hard, chunk_tokens)


class _Rows:
    """The loss of some rows of a batch (losses.fused.OfRows)."""

    def __init__(self, loss: Distillation, out: HeadInput, batch: Batch):
        self._loss, self._columns = loss, batch.columns
        self._head = None if IDS in batch.columns else ready(loss.head, batch.columns[HIDDEN])
        self._vocab, self._first_row = out.vocab, out.first_row
        self._labels_N1 = batch.labels_BT.reshape(-1, 1)

    def __call__(self, logits_CV: torch.Tensor, index_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        target, hard, labels_C1 = self._loss.target, self._loss.hard, self._labels_N1[index_C]
        plain_CV = log_softmax(logits_CV, self._vocab)
        nll_C1 = -picked(plain_CV, labels_C1, self._vocab, self._first_row)
        logq_CV = (
            plain_CV.clone() if target.temperature == 1 else log_softmax(logits_CV / target.temperature, self._vocab)
        )
        value_C1, grad_CV = self._compare(logq_CV, index_C)
        grad_CV.mul_((1 - hard) * target.temperature)
        if hard:
            rows_C1, own_C1 = own_rows(labels_C1, logits_CV.shape[1], self._first_row)
            grad_CV.add_(plain_CV.exp_().scatter_add_(1, rows_C1, -own_C1.to(plain_CV.dtype)), alpha=hard)
        loss_C1 = (1 - hard) * target.temperature**2 * value_C1 + hard * nll_C1
        return torch.cat((loss_C1, nll_C1, value_C1), dim=1).T, grad_CV

    def _compare(self, logq_CV: torch.Tensor, index_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(D_C1, its gradient by x / T)."""
        target, vocab = self._loss.target, self._vocab
        if IDS in self._columns:
            ids_CK, logp_CK = (self._columns[name].flatten(0, 1)[index_C] for name in (IDS, LOGP))
            return self._of_classes(logq_CV, ids_CK[:, :-1].long(), logp_CK.to(logq_CV.dtype))
        logp_CV = teacher_rows(self._columns[HIDDEN].flatten(0, 1)[index_C], self._head, target.temperature)
        if target.top_k:
            classes = likeliest(logp_CV, target.top_k, vocab, self._first_row)
            return self._of_classes(logq_CV, *classes)
        return divergence(logq_CV, logp_CV, target.kind, target.mix, vocab.sum_)

    def _of_classes(
        self, logq_CV: torch.Tensor, ids_CK: torch.Tensor, logp_CK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`logp_CK` has one class more than `ids_CK`: all other tokens, which share their class's gradient by q."""
        named_CK = picked(logq_CV, ids_CK, self._vocab, self._first_row)
        q_CV = logq_CV.exp_()
        rest_C1 = others(q_CV, ids_CK, self._vocab, self._first_row)
        logq_CK = torch.cat([named_CK, rest_C1.log()], dim=1).clamp_(min=NEVER)
        value_C1, grad_CK = divergence(logq_CK, logp_CK, self._loss.target.kind, self._loss.target.mix)
        each_C1 = grad_CK[:, -1:] / rest_C1.clamp(min=torch.finfo(rest_C1.dtype).tiny)
        rows_CK, own_CK = own_rows(ids_CK, q_CV.shape[1], self._first_row)
        return value_C1, q_CV.mul_(each_C1).scatter_add_(1, rows_CK, grad_CK[:, :-1] * own_CK)


def ready(head: HeadInput | None, hidden_BTD: torch.Tensor) -> HeadInput:
    """The head with its matrix in the dtype of the hidden states, cast once for all chunks."""
    assert head is not None, "whoever adds the column of hidden states sets the loss's head"
    return replace(head, weight_VD=head.weight_VD.detach().to(hidden_BTD.dtype))


def teacher_rows(hidden_CD: torch.Tensor, head: HeadInput | None, temperature: float) -> torch.Tensor:
    """log p of some rows over this rank's part of the vocabulary."""
    assert head is not None
    return log_softmax(logits_of(head, hidden_CD).div_(temperature), head.vocab)


@torch.no_grad()
def teacher_columns(
    out: HeadInput, labels_BT: torch.Tensor, top_k: int, temperature: float, chunk_tokens: int
) -> dict[str, torch.Tensor]:
    """The columns of a stored teacher, `teacher_ids` (B, T, K + 1) and `teacher_logp`, of places with a label; 0 at
    others. Every rank of the vocabulary's axis has them."""
    hidden_ND, out = out.hidden_BTD.flatten(0, 1), ready(out, out.hidden_BTD)
    ids_NK = torch.zeros(len(hidden_ND), top_k + 1, dtype=torch.int32, device=hidden_ND.device)
    logp_NK = torch.zeros_like(ids_NK, dtype=torch.float32)
    for index_C in (labels_BT.flatten() != IGNORE).nonzero()[:, 0].split(chunk_tokens):
        if len(index_C):
            logp_CV = teacher_rows(hidden_ND[index_C], out, temperature)
            ids_CK, logp_CK = likeliest(logp_CV, top_k, out.vocab, out.first_row)
            ids_NK[index_C] = torch.nn.functional.pad(ids_CK, (0, 1), value=-1).int()
            logp_NK[index_C] = logp_CK.float()
    shape = *labels_BT.shape, top_k + 1
    return {IDS: ids_NK.view(shape), LOGP: logp_NK.view(shape)}
