"""Log-probabilities of labels, one for each place, differentiable, a few rows of logits at a time.

For a place with logits x and label y: log p = x_y - log Σ exp(x), and d log p / dx = onehot(y) - softmax(x). With
softcap c the logits are x = c·tanh(u / c) of the products u, and du = dx·(1 - (x / c)²).

What a loss makes of these numbers is known only after the last of them, as where it sums over answers. So the forward
pass keeps Σ exp(x) of each place and no logits, and the backward pass makes each chunk's again: four matrix products
where the cross-entropy of one pass has three (truestep.losses.cross_entropy), and never more than `chunk_tokens` rows.

Where the rows of the output matrix are split over an axis, each of its ranks has the logits of its own rows; only the
sums are shared. Every rank ends with the same numbers, and its share of the gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from truestep.losses.fused import capped, chunks
from truestep.numerics.axis import Axis
from truestep.numerics.batch import IGNORE
from truestep.numerics.head import HeadInput, Logits


def log_probs(out: HeadInput | Logits, labels_BT: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """logp_BT of the labels, in fp32 (float64 stays float64); 0, without gradient, where the label is IGNORE.

    Products are made in autocast's dtype where autocast is on, else in that of the hidden states; everything else, and
    the accumulation of the weight's gradient, in fp32 at least. The backward pass may run again."""
    if isinstance(out, Logits):
        real_BT = labels_BT != IGNORE
        logits_BTV = out.logits()
        logp_BT = logits_BTV.gather(2, (labels_BT * real_BT)[..., None])[..., 0] - logits_BTV.logsumexp(2)
        return torch.where(real_BT, logp_BT, 0.0)
    device = out.hidden_BTD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else out.hidden_BTD.dtype
    options = _Options(out.softcap, chunk_tokens, dtype, out.vocab, out.first_row)
    with torch.autocast(device, enabled=False):
        return _LogProbs.apply(out.hidden_BTD, out.weight_VD, labels_BT, options)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class _Options:
    softcap: float | None
    chunk_tokens: int
    dtype: torch.dtype
    vocab: Axis
    first_row: int

    def logits(self, hidden_CD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """logits_CV of this rank's part of the vocabulary, in fp32 at least."""
        return capped(hidden_CD.to(self.dtype) @ weight_VD.T, self.softcap)

    def own(self, labels_C1: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of this rank, 0 for labels that lie elsewhere; whether they lie here)."""
        rows_C1 = labels_C1 - self.first_row
        own_C1 = (rows_C1 >= 0) & (rows_C1 < num_rows)
        return rows_C1 * own_C1, own_C1


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, labels_BT: torch.Tensor, options: _Options
    ) -> torch.Tensor:
        hidden_ND, labels_N = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), labels_BT.reshape(-1)
        weight, wide = weight_VD.to(options.dtype), torch.promote_types(options.dtype, torch.float32)
        logp_N = hidden_ND.new_zeros(len(labels_N), dtype=wide)
        log_z_N = torch.zeros_like(logp_N)
        for index_C in chunks(labels_BT, options.chunk_tokens):
            logits_CV = options.logits(hidden_ND[index_C], weight)
            rows_C1, own_C1 = options.own(labels_N[index_C, None], len(weight))
            label_C1, log_z_C1 = _shared(logits_CV, rows_C1, own_C1, options.vocab)
            logp_N[index_C], log_z_N[index_C] = (label_C1 - log_z_C1)[:, 0], log_z_C1[:, 0]
        ctx.options = options
        ctx.save_for_backward(hidden_BTD, weight_VD, labels_BT, log_z_N)
        return logp_N.view(labels_BT.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_BTD, weight_VD, labels_BT, log_z_N = ctx.saved_tensors
        options, (needs_hidden, needs_weight) = ctx.options, ctx.needs_input_grad[:2]
        hidden_ND, labels_N = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), labels_BT.reshape(-1)
        weight, grad_N = weight_VD.to(options.dtype), grads[0].reshape(-1)
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=options.dtype) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight, dtype=log_z_N.dtype) if needs_weight else None
        for index_C in chunks(labels_BT, options.chunk_tokens):
            hidden_CD = hidden_ND[index_C].to(options.dtype)
            logits_CV = options.logits(hidden_CD, weight)
            rows_C1, own_C1 = options.own(labels_N[index_C, None], len(weight))
            slope_CV = None if options.softcap is None else 1 - (logits_CV / options.softcap).square()
            grad_CV = logits_CV.sub_(log_z_N[index_C, None]).exp_().neg_()
            grad_CV.scatter_add_(1, rows_C1, own_C1.to(grad_CV.dtype)).mul_(grad_N[index_C, None])
            grad_CV = (grad_CV if slope_CV is None else grad_CV.mul_(slope_CV)).to(options.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[index_C] = grad_CV @ weight
            if grad_weight_VD is not None:
                grad_weight_VD.add_(grad_CV.T @ hidden_CD)
        grad_hidden_BTD = None if grad_hidden_ND is None else grad_hidden_ND.view(hidden_BTD.shape).to(hidden_BTD.dtype)
        return grad_hidden_BTD, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None, None


def _shared(
    logits_CV: torch.Tensor, rows_C1: torch.Tensor, own_C1: torch.Tensor, vocab: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the label's logit, log Σ exp) of each row, over all ranks."""
    label_C1 = logits_CV.gather(1, rows_C1)
    if vocab.size == 1:
        return label_C1, logits_CV.logsumexp(1, keepdim=True)
    top_C1 = vocab.max_(logits_CV.amax(1, keepdim=True))
    shared = torch.stack(((logits_CV - top_C1).exp_().sum(1, keepdim=True), label_C1 * own_C1))
    total_C1, label_C1 = vocab.sum_(shared).unbind()
    return label_C1, total_C1.log() + top_C1
