"""The reference of preferences in the step: its log-probabilities as a column of each microbatch, and KTO's reference
point before each step."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import fsum

import torch
from torch import nn

from truestep.adapters.switch import off
from truestep.losses.log_probs import log_probs
from truestep.losses.preference import REFERENCE, PreferenceLoss
from truestep.numerics.batch import Batch
from truestep.numerics.head import HeadInput, Logits
from truestep.parallel.job import Job
from truestep.parallel.model import Parallel
from truestep.train.evaluate import as_it_was


@dataclass(frozen=True)
class Reference:
    """Adds log-probabilities of labels under a model as a column, on ranks with the head (one of
    truestep.train.state's `before`). `trunk`: the model is the trained one without its adapters; else `parallel` is one
    of its own, which takes no gradient. Collective, as a forward pass is."""

    parallel: Parallel
    chunk_tokens: int
    trunk: bool = False

    def __call__(self, batch: Batch) -> Batch:
        parts = self.parallel.parts
        with as_it_was(parts), off(*parts) if self.trunk else nullcontext():
            for part in parts:
                part.eval()
            logp_BT = label_logp(self.parallel, batch, self.chunk_tokens)
        return batch if logp_BT is None else replace(batch, columns={**batch.columns, REFERENCE: logp_BT})


def label_logp(parallel: Parallel, batch: Batch, chunk_tokens: int) -> torch.Tensor | None:
    """logp_BT of the labels of this rank's part of a microbatch, without gradients; None without the head."""

    def head(out: HeadInput | Logits) -> torch.Tensor:
        return log_probs(out, batch.labels_BT, chunk_tokens)

    return parallel.evaluate(batch, head)


@dataclass
class ReferencePoint:
    """Sets a KTO loss's z: max(0, the mean log-ratio, of an answer to a prompt, over pairs of the prompt of one row of
    data and the answer of another). `batches`: this rank's part of them, each with the column of the reference; as many
    on every rank. `num_pairs`: on all ranks together. The sum is exact, so that it depends on no number of ranks."""

    parallel: Parallel
    job: Job
    loss: PreferenceLoss
    batches: Sequence[Batch]
    num_pairs: int

    def __call__(self) -> None:
        ratios: list[float] = []
        with as_it_was(self.parallel.parts):
            for part in self.parallel.parts:
                part.eval()
            for batch in self.batches:
                batch = batch.to(self.parallel.device)
                logp_BT = label_logp(self.parallel, batch, self.loss.chunk_tokens)
                if logp_BT is not None and self.parallel.counts:
                    ratios += (logp_BT.double() - batch.columns[REFERENCE].double()).sum(1).tolist()
        everybody = self.job.everybody(ratios)
        self.loss.point = max(0.0, fsum(ratio for mine in everybody for ratio in mine) / self.num_pairs)


def without_dropout(parts: Sequence[nn.Module]) -> None:
    """From now on a module of the user's own draws no dropout either: log-probabilities are of the model as it is."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
