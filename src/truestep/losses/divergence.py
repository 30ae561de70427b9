"""Divergences of a student's distribution q from a teacher's p, over a vocabulary that may be split over an axis.

forward: KL(p, q) = Σ p log(p / q). reverse: KL(q, p). js: the generalised Jensen-Shannon divergence with the teacher's
weight b (arXiv 2306.13649, section 2), b·KL(p, m) + (1 - b)·KL(q, m) with m = b·p + (1 - b)·q. Divided by b it goes to
the forward KL for b to 0, and divided by 1 - b to the reverse one for b to 1; itself it goes to 0 at both ends, so the
ends are taken to be these limits.

With u the logits that q is the softmax of, every gradient is dq_i (h_i - Σ q h), where h is the derivative of the
divergence by q: -p/q, log(q / p), (1 - b)·log(q / m).
"""

import math
from collections.abc import Callable
from typing import Literal

import torch

from truestep.numerics.axis import Axis, gathered

Kind = Literal["forward", "reverse", "js"]
NEVER = -1e4
"""Log-probability of what has none: exp of it is 0, and its products with 0 are 0."""


def divergence(
    logq_CV: torch.Tensor,
    logp_CV: torch.Tensor,
    kind: Kind,
    mix: float = 0.5,
    add: Callable[[torch.Tensor], torch.Tensor] = lambda x_C1: x_C1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(divergence_C1 of each row, its gradient by the student's logits (C, V)). `add`: the sum over the ranks that the
    classes of a row are split over, in place. Overwrites both arguments."""
    if kind == "js" and mix in (0.0, 1.0):
        kind = "reverse" if mix else "forward"
    if kind == "forward":
        p_CV, q_CV = logp_CV.exp(), logq_CV.exp()
        value_C1 = add((logp_CV.sub_(logq_CV).mul_(p_CV)).sum(1, keepdim=True))
        return value_C1, q_CV.sub_(p_CV)
    q_CV = logq_CV.exp()
    if kind == "reverse":
        ratio_CV = logq_CV.sub_(logp_CV)
        value_C1 = add((q_CV * ratio_CV).sum(1, keepdim=True))
        return value_C1, ratio_CV.sub_(value_C1).mul_(q_CV)
    mixed_CV = torch.logaddexp(logp_CV + math.log(mix), logq_CV + math.log1p(-mix))
    p_CV = logp_CV.exp()
    of_teacher_C1 = (logp_CV.sub_(mixed_CV).mul_(p_CV)).sum(1, keepdim=True)
    ratio_CV = logq_CV.sub_(mixed_CV)
    both = add(torch.stack((of_teacher_C1, (q_CV * ratio_CV).sum(1, keepdim=True))))
    value_C1 = mix * both[0] + (1 - mix) * both[1]
    return value_C1, ratio_CV.sub_(both[1]).mul_(q_CV).mul_(1 - mix)


def log_softmax(logits_CV: torch.Tensor, vocab: Axis) -> torch.Tensor:
    """Log-probabilities of this rank's part of the vocabulary."""
    if vocab.size == 1:
        return torch.log_softmax(logits_CV, dim=1)
    top_C1 = vocab.max_(logits_CV.amax(1, keepdim=True))
    total_C1 = vocab.sum_((logits_CV - top_C1).exp_().sum(1, keepdim=True))
    return logits_CV - (total_C1.log_() + top_C1)


def picked(values_CV: torch.Tensor, ids_CK: torch.Tensor, vocab: Axis, first_row: int) -> torch.Tensor:
    """values_CK of these ids, wherever they lie."""
    if vocab.size == 1:
        return values_CV.gather(1, ids_CK)
    rows_CK, own_CK = own_rows(ids_CK, values_CV.shape[1], first_row)
    return vocab.sum_(values_CV.gather(1, rows_CK) * own_CK)


def own_rows(ids_CK: torch.Tensor, num_rows: int, first_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of this rank, 0 for ids that lie elsewhere; whether they lie here)."""
    rows_CK = ids_CK - first_row
    own_CK = (rows_CK >= 0) & (rows_CK < num_rows)
    return rows_CK * own_CK, own_CK


def likeliest(logp_CV: torch.Tensor, k: int, vocab: Axis, first_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids_CK int64 of the k likeliest tokens, logp (C, k + 1) of these and last of all the others together)."""
    near = min(k, logp_CV.shape[1])
    best_CK, ids_CK = logp_CV.topk(near, dim=1)
    ids_CK = ids_CK + first_row
    if vocab.size > 1:
        padding = 0, k - near
        best_CK = gathered(torch.nn.functional.pad(best_CK, padding, value=2 * NEVER), vocab, 1)
        ids_CK = gathered(torch.nn.functional.pad(ids_CK, padding), vocab, 1)
        best_CK, order_CK = best_CK.topk(k, dim=1)
        ids_CK = ids_CK.gather(1, order_CK)
    rest_C1 = others(logp_CV.exp(), ids_CK, vocab, first_row)
    return ids_CK, torch.cat([best_CK, rest_C1.log_()], dim=1).clamp_(min=NEVER)


def others(p_CV: torch.Tensor, ids_CK: torch.Tensor, vocab: Axis, first_row: int) -> torch.Tensor:
    """p_C1: probability of all tokens but these, added up and not taken from 1, which would leave rounding alone where
    it is small. In place, `p_CV` becomes 0 at these tokens."""
    rows_CK, own_CK = own_rows(ids_CK, p_CV.shape[1], first_row)
    p_CV.scatter_reduce_(1, rows_CK, torch.where(own_CK, 0.0, torch.inf).to(p_CV.dtype), "amin")
    return vocab.sum_(p_CV.sum(1, keepdim=True))
