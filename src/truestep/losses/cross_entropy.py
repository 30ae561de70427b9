"""Cross-entropy fused with the output matrix, a few rows of logits at a time.

For a target row with logits x, label y and Z = Σ exp(x): loss = log Z - x_y + w·(log Z)², the last term being the
z-loss (PaLM, arXiv 2204.02311, section 5). Its gradient is dx = softmax(x)·(1 + 2w·log Z) - onehot(y). With softcap c
the logits are x = c·tanh(u / c) of the products u, and du = dx·(1 - (x / c)²).
Where targets have weights, both terms of a row's loss, and with them its gradient, are multiplied by the row's.

Both gradients are made in the forward pass, while a chunk's logits exist: three matrix products as in the plain loss,
but never more than `chunk_tokens` rows of logits. (Making them in the backward pass would need a fourth product.)

Where the rows of the output matrix are split over an axis, each of its ranks has the logits of its own rows; only Z,
the largest logit and the label's are shared. Every rank ends with the same sums, and its share of the gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from truestep.errors import UserError
from truestep.losses.base import LossSum
from truestep.numerics.axis import Axis
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput, Logits, OwnLoss
from truestep.recipe.stage import Stage


@dataclass(frozen=True)
class CrossEntropy:
    """Next-token cross-entropy with optional z-loss. Metrics: "nll", the sum without the z-loss."""

    z_loss: float = 0.0
    chunk_tokens: int = 1024

    def weight(self, batch: Batch) -> int:
        return batch.num_targets

    def __call__(self, out: HeadInput | Logits | OwnLoss, batch: Batch) -> LossSum:
        return self.weighted(out, batch, None)

    def weighted(self, out: HeadInput | Logits | OwnLoss, batch: Batch, weights_BT: torch.Tensor | None) -> LossSum:
        """The same with a weight for each target; None: each weighs 1."""
        if isinstance(out, OwnLoss):
            if weights_BT is not None:
                raise UserError(
                    'targets with weights (as sft.weighting = "sample" gives them) need logits, but the model returns '
                    "a loss of its own; return logits, or let every target weigh the same."
                )
            if self.z_loss:
                raise UserError(
                    f"loss.z_loss = {self.z_loss} would not be used: the model returns a loss of its own, without "
                    f"logits; set it to 0 or return logits."
                )
            return LossSum(out.sum)
        if isinstance(out, HeadInput):
            total, nll = linear_cross_entropy(
                out.hidden_BTD,
                out.weight_VD,
                batch.labels_BT,
                out.softcap,
                self.z_loss,
                self.chunk_tokens,
                out.vocab,
                out.first_row,
                out.backward_twice,
                weights_BT,
            )
        else:
            total, nll = cross_entropy(out.logits(), batch.labels_BT, self.z_loss, weights_BT)
        return LossSum(total, {"nll": nll})


def of_stage(stage: Stage, chunk_tokens: int) -> CrossEntropy:
    return CrossEntropy(stage.loss.z_loss, chunk_tokens)


def cross_entropy(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, z_loss: float, weights_BT: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the targets, times their weights, of (loss with z-loss, loss without, detached), for logits that exist
    already."""
    labels_N = labels_BT.flatten()
    real_N = labels_N != IGNORE
    weights_N = None if weights_BT is None else weights_BT.flatten()[real_N]
    logits_NV, labels_N = logits_BTV.flatten(0, -2)[real_N], labels_N[real_N]
    log_z_N = torch.logsumexp(logits_NV, dim=-1)
    nll = _sum(log_z_N - logits_NV.gather(1, labels_N[:, None])[:, 0], weights_N)
    total = nll + z_loss * _sum(log_z_N.square(), weights_N) if z_loss else nll
    return total, nll.detach()


def _sum(x_N: torch.Tensor, weights_N: torch.Tensor | None) -> torch.Tensor:
    return x_N.sum() if weights_N is None else (x_N * weights_N).sum()


def linear_cross_entropy(
    hidden_BTD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_BT: torch.Tensor,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk_tokens: int = 1024,
    vocab: Axis | None = None,
    first_row: int = 0,
    backward_twice: bool = False,
    weights_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy` of softcap(hidden @ weight.T) without the logits: the sums (with z-loss, without and detached)
    over labels other than IGNORE, in fp32 (float64 stays float64). Products are made in autocast's dtype where
    autocast is on, else in that of the hidden states; everything else, and the accumulation of the weight's gradient,
    in fp32 at least. `weight_VD` holds the rows from `first_row` on where `vocab` splits them. The backward pass may
    run once, unless `backward_twice`, which takes more memory. `weights_BT`: constant weights of the targets; without
    them each weighs 1."""
    device = hidden_BTD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BTD.dtype
    split = vocab or Axis("tp"), first_row
    options = _Options(softcap, z_loss, chunk_tokens, dtype, torch.is_grad_enabled(), *split, backward_twice)
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden_BTD, weight_VD, labels_BT, weights_BT, options)


@dataclass(frozen=True)
class _Options:
    softcap: float | None
    z_loss: float
    chunk_tokens: int
    dtype: torch.dtype
    grad: bool
    vocab: Axis
    first_row: int
    backward_twice: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_BTD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_BT: torch.Tensor,
        weights_BT: torch.Tensor | None,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]).to(options.dtype)
        labels_N = labels_BT.reshape(-1)
        weights_N = None if weights_BT is None else weights_BT.reshape(-1)
        rows_n = (labels_N != IGNORE).nonzero()[:, 0]  # n <= N rows have a target
        partial = len(rows_n) < len(labels_N)
        if partial:
            hidden_ND, labels_N = hidden_ND[rows_n], labels_N[rows_n]
            weights_N = None if weights_N is None else weights_N[rows_n]
        needs = [options.grad and need for need in ctx.needs_input_grad[:2]]
        chunks = _Chunks(hidden_ND, weight_VD.to(options.dtype), labels_N, weights_N, options, *needs)
        chunks.run()

        grad_hidden_BTD = chunks.grad_hidden_ND
        if grad_hidden_BTD is not None:
            if partial:
                zeros_ND = grad_hidden_BTD.new_zeros(labels_BT.numel(), hidden_BTD.shape[-1])
                grad_hidden_BTD = zeros_ND.index_copy_(0, rows_n, grad_hidden_BTD)
            grad_hidden_BTD = grad_hidden_BTD.view(hidden_BTD.shape)
        ctx.twice = options.backward_twice
        ctx.grads = [(grad_hidden_BTD, hidden_BTD.dtype), (chunks.grad_weight_VD, weight_VD.dtype)]
        nll, z_loss = _sum(chunks.nll_N, chunks.weights_N), options.z_loss
        total = nll + z_loss * _sum(chunks.log_z_N.square(), chunks.weights_N) if z_loss else nll.clone()
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, grad_nll: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the fused cross-entropy keeps one set of gradients: run the forward pass again")
        if ctx.twice:
            kept = (None if g is None else (g * grad_total).to(dtype) for g, dtype in ctx.grads)
            return *kept, None, None, None
        # Scaled in place, and forgotten here so that autograd may take the memory over as .grad instead of copying it.
        grads, ctx.grads = ctx.grads, None
        grad_hidden, grad_weight = (None if g is None else g.mul_(grad_total).to(dtype) for g, dtype in grads)
        return grad_hidden, grad_weight, None, None, None


class _Chunks:
    """The sums and gradients of rows that all have a target, chunk by chunk through two buffers of logits."""

    def __init__(
        self,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_N: torch.Tensor,
        weights_N: torch.Tensor | None,
        options: _Options,
        needs_hidden: bool,
        needs_weight: bool,
    ):
        self.hidden_ND, self.weight_VD, self.labels_N, self.options = hidden_ND, weight_VD, labels_N, options
        wide = torch.promote_types(options.dtype, torch.float32)
        self.weights_N = None if weights_N is None else weights_N.to(wide)
        self.nll_N = hidden_ND.new_empty(len(labels_N), dtype=wide)
        self.log_z_N = torch.empty_like(self.nll_N)
        self.grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        self.grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None

    def run(self) -> None:
        num_rows, limit = len(self.labels_N), self.options.chunk_tokens
        num_chunks = -(-num_rows // limit)
        size = -(-num_rows // num_chunks) if num_chunks else 0  # even chunks: no last one of a few rows
        for start in range(0, num_rows, size or 1):
            self._chunk(slice(start, min(start + size, num_rows)))

    def _chunk(self, rows: slice) -> None:
        hidden_CD, labels_C1 = self.hidden_ND[rows], self.labels_N[rows, None]
        softcap, z_loss, wide = self.options.softcap, self.options.z_loss, self.nll_N.dtype
        logits_CV = hidden_CD @ self.weight_VD.T
        if softcap is not None:
            logits_CV = logits_CV.to(wide).div_(softcap).tanh_().mul_(softcap)
        nll_C1, log_z_C1, logp_CV, hit_CV = self._softmax(logits_CV, labels_C1)
        self.nll_N[rows], self.log_z_N[rows] = nll_C1[:, 0], log_z_C1[:, 0]
        if self.grad_hidden_ND is None and self.grad_weight_VD is None:
            return
        grad_CV = logp_CV.exp_()
        if z_loss:
            grad_CV.mul_(1 + 2 * z_loss * log_z_C1)
        grad_CV.scatter_add_(1, *hit_CV)
        if self.weights_N is not None:
            grad_CV.mul_(self.weights_N[rows, None])
        if softcap is not None:
            grad_CV.mul_(logits_CV.div_(softcap).square_().neg_().add_(1))
        grad_CV = grad_CV.to(self.options.dtype)
        if self.grad_hidden_ND is not None:
            torch.mm(grad_CV, self.weight_VD, out=self.grad_hidden_ND[rows])
        if self.grad_weight_VD is not None:
            if self.grad_weight_VD.dtype == grad_CV.dtype:
                self.grad_weight_VD.addmm_(grad_CV.T, hidden_CD)
            else:
                self.grad_weight_VD.add_(grad_CV.T @ hidden_CD)

    def _softmax(
        self, logits_CV: torch.Tensor, labels_C1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """(nll_C1, log_z_C1, logp_CV of this rank's rows, (index_C1, value_C1) of the label's -1 in the gradient)."""
        vocab, wide = self.options.vocab, self.nll_N.dtype
        if vocab.size == 1:
            logp_CV = torch.log_softmax(logits_CV, dim=-1, dtype=wide)
            nll_C1 = logp_CV.gather(1, labels_C1).neg_()
            minus_C1 = logp_CV.new_full(labels_C1.shape, -1.0)
            return nll_C1, nll_C1 + logits_CV.gather(1, labels_C1), logp_CV, (labels_C1, minus_C1)
        logits_CV = logits_CV.to(wide)
        rows = labels_C1 - self.options.first_row
        own_C1 = (rows >= 0) & (rows < logits_CV.shape[1])
        rows = rows * own_C1
        top_C1 = vocab.max_(logits_CV.amax(1, keepdim=True))
        label_C1 = logits_CV.gather(1, rows) * own_C1
        shared = torch.stack(((logits_CV - top_C1).exp_().sum(1, keepdim=True), label_C1))
        total_C1, label_C1 = vocab.sum_(shared).unbind()
        log_z_C1 = total_C1.log() + top_C1
        return log_z_C1 - label_C1, log_z_C1, logits_CV - log_z_C1, (rows, -own_C1.to(wide))
