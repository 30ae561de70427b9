"""Scores of a reward model for token sequences: the same whatever they are padded with, where, and beside what."""

from collections.abc import Sequence

import torch

from truestep.errors import ModelError
from truestep.models.decoder import Decoder
from truestep.numerics.head import Scores


@torch.no_grad()
def score(model: Decoder, samples: Sequence[Sequence[int]], rows: int = 16) -> list[float]:
    """The score of each sample, read at its last token. `rows`: samples that are run together, longest ones first."""
    device = next(model.parameters()).device
    order = sorted(range(len(samples)), key=lambda index: -len(samples[index]))
    found = [0.0] * len(samples)
    for start in range(0, len(order), rows):
        group = [samples[index] for index in order[start : start + rows]]
        tokens_BT = torch.zeros(len(group), len(group[0]), dtype=torch.int64)
        for row, ids in enumerate(group):
            tokens_BT[row, : len(ids)] = torch.tensor(list(ids))
        lengths_B = torch.tensor([len(ids) for ids in group])
        real_BT = torch.arange(tokens_BT.shape[1]) < lengths_B[:, None]
        scores_B = score_rows(model, tokens_BT.to(device), real_BT.to(device))
        for index, value in zip(order[start:], scores_B.tolist()):
            found[index] = value
    return found


@torch.no_grad()
def score_rows(model: Decoder, tokens_BT: torch.Tensor, real_BT: torch.Tensor) -> torch.Tensor:
    """scores_B of rows that are padded at either side, or both. `real_BT` (bool) tells tokens from padding; ids never
    do, so that a token that also pads may stand inside of a sample and at its end. Positions count from the first real
    token. ModelError for a model without scores, or a row without a real token."""
    if not model.section.scores:
        raise ModelError("the model gives logits and no scores; take one that a stage of kind = reward_model has made.")
    if not bool(real_BT.any(1).all()):
        raise ModelError("a row without a token has no score; leave it out.")
    positions_BT = (real_BT.cumsum(1) - 1).clamp(min=0)
    documents_BT = torch.where(real_BT, 0, -1).int()
    out: Scores = model(tokens_BT, positions_BT, documents_BT, head=lambda out: out)
    length = real_BT.shape[1]
    last_B1 = length - 1 - real_BT.flip(1).int().argmax(1, keepdim=True)
    return out.scores_BT.gather(1, last_B1)[:, 0]
