"""Negative log-likelihood of each target by itself, for evaluation: no gradient, a few rows of logits at a time."""

from dataclasses import replace

import torch

from truestep.numerics.batch import IGNORE
from truestep.numerics.head import HeadInput, Logits

CHUNK_ROWS = 512


@torch.no_grad()
def token_nll(out: HeadInput | Logits, labels_BT: torch.Tensor) -> torch.Tensor:
    """nll_BT in nats, fp32 (float64 stays float64); 0 where the label is IGNORE."""
    labels_N = labels_BT.reshape(-1)
    if isinstance(out, Logits):
        nll_N = _nll(out.logits().flatten(0, -2), labels_N)
    else:
        hidden_ND = out.hidden_BTD.reshape(1, -1, out.hidden_BTD.shape[-1])
        pieces = zip(hidden_ND.split(CHUNK_ROWS, dim=1), labels_N.split(CHUNK_ROWS))
        nll_N = torch.cat([_nll(replace(out, hidden_BTD=h).logits()[0], y) for h, y in pieces])
    return nll_N.view(labels_BT.shape)


def _nll(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE, reduction="none")
