"""Held-out evaluation: loss per target, bits per byte. Leaves the model's mode and every random stream as they were."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from truestep.losses.base import Loss
from truestep.losses.token_nll import token_nll
from truestep.numerics.batch import IGNORE, Batch
from truestep.parallel.job import Job
from truestep.parallel.model import Parallel
from truestep.train.low_precision import computes_low, products_high


@dataclass(frozen=True)
class HeldOut:
    """`loss`: nats per target, special tokens included. `bits_per_byte`: special tokens left out of both sums; None
    where the tokenizer's byte lengths are not known. `method` says what the bits cover. `high_loss`: nats per target of
    the same weights with every product high, where low precision is on; what is more in `loss` the formats cost.
    `metrics`: what a loss that counts something else than targets says beside itself, per unit of its weight."""

    loss: float
    targets: int
    bits_per_byte: float | None
    num_bytes: int
    method: str
    high_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Runs(Protocol):
    """A model that answers for microbatches; see parallel.model.Parallel. `counts`: this rank's results are counted."""

    @property
    def parts(self) -> Sequence[nn.Module]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def counts(self) -> bool: ...
    def own_part(self, batch: Batch) -> Batch: ...
    def evaluate(self, batch: Batch, head: Callable[[Any], Any]) -> Any: ...


@dataclass(frozen=True)
class Whole:
    """A model that this rank holds whole, on one device, in the dtype of its parameters."""

    model: nn.Module
    device: torch.device
    counts: bool = True

    @property
    def parts(self) -> Sequence[nn.Module]:
        return (self.model,)

    def own_part(self, batch: Batch) -> Batch:
        return batch

    def evaluate(self, batch: Batch, head: Callable[[Any], Any]) -> Any:
        with torch.no_grad():
            return self.model(batch.tokens_BT, batch.positions_BT, batch.documents_BT, head)


@dataclass(frozen=True)
class Text:
    """What is needed to turn nats into bits per byte of the whole text: bytes of each id (0: special), and the text's
    own size. A document's first token is never predicted; it is charged log2(vocab_size) bits."""

    byte_lengths: torch.Tensor
    num_bytes: int
    num_documents: int
    complete: bool


def evaluate(parallel: Runs, job: Job, batches: Iterable[Batch], text: Text | None) -> HeldOut:
    """Evaluate on batches of which every rank gets the same number (sharded weights are gathered in step)."""
    with as_it_was(parallel.parts):
        for part in parallel.parts:
            part.eval()
        nats, targets, text_nats, num_bytes = _sums(parallel, job, batches, text)
    loss = nats / targets if targets else math.nan
    if text is None or num_bytes == 0:
        return HeldOut(loss, int(targets), None, 0, "bytes of tokens are not known")
    bits, method = text_nats / math.log(2), "targets only"
    if text.complete:
        bits += text.num_documents * math.log2(len(text.byte_lengths))
        num_bytes, method = text.num_bytes, "whole text; the first token of a document charged log2(vocabulary) bits"
    return HeldOut(loss, int(targets), bits / num_bytes, int(num_bytes), method)


def evaluate_with_gap(
    parallel: Parallel, job: Job, batches: Callable[[], Iterable[Batch]], text: Text | None
) -> HeldOut:
    """`evaluate`, and where low precision is on a second time for `high_loss`. `batches()` begins anew."""
    found = evaluate(parallel, job, batches(), text)
    if not computes_low(parallel):
        return found
    with products_high(parallel):
        return replace(found, high_loss=evaluate(parallel, job, batches(), None).loss)


def evaluate_loss(
    parallel: Parallel, job: Job, batches: Iterable[Batch], loss: Loss, before: Iterable[Callable[[Batch], Batch]] = ()
) -> HeldOut:
    """A loss that is not of targets, in place of nats per target: its sum over batches by the sum of its weights, and
    its metrics likewise. `before`: see TrainState."""

    def sums_of(batch: Batch, out: Any) -> dict[str, torch.Tensor]:
        found = loss(out, batch)
        return {"loss": found.sum, **found.metrics}

    total, weight = Counter[str](), 0.0
    with as_it_was(parallel.parts):
        for part in parallel.parts:
            part.eval()
        for index, batch in enumerate(batches):
            job.counters.microbatch(index)
            batch = parallel.own_part(batch)
            weight += loss.weight(batch) if parallel.counts else 0.0
            batch = batch.to(parallel.device)
            for add in before:
                batch = add(batch)
            sums = parallel.evaluate(batch, partial(sums_of, batch))
            if parallel.counts:
                total.update({name: value.item() for name, value in sums.items()})
    everybody = job.everybody((dict(total), weight))
    weight = sum(one for _, one in everybody)
    names = dict.fromkeys(name for sums, _ in everybody for name in sums)
    means = {name: sum(sums.get(name, 0.0) for sums, _ in everybody) / (weight or math.nan) for name in names}
    return HeldOut(means.pop("loss", math.nan), int(weight), None, 0, "the stage's own loss", metrics=means)


@contextmanager
def as_it_was(models: Iterable[nn.Module]) -> Iterator[None]:
    """Every module's train flag and torch's random streams come back, also when the body raises."""
    flags = [(module, module.training) for model in models for module in model.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for module, training in flags:
                module.training = training


def _sums(parallel: Runs, job: Job, batches: Iterable[Batch], text: Text | None) -> list[float]:
    sums = torch.zeros(4, dtype=torch.float64, device=parallel.device)
    lengths = text.byte_lengths.to(parallel.device) if text is not None else None
    for index, batch in enumerate(batches):
        job.counters.microbatch(index)
        batch = parallel.own_part(batch).to(parallel.device)
        nll_BT = parallel.evaluate(batch, partial(token_nll, labels_BT=batch.labels_BT))
        if nll_BT is None or not parallel.counts:
            continue
        nll_BT = nll_BT.double()
        real_BT = batch.labels_BT != IGNORE
        sums[0] += nll_BT.sum()
        sums[1] += real_BT.sum()
        if lengths is not None:
            bytes_BT = lengths[batch.labels_BT.clamp(min=0)] * real_BT
            sums[2] += (nll_BT * (bytes_BT > 0)).sum()
            sums[3] += bytes_BT.sum()
    return job.all_sum(sums.tolist())
