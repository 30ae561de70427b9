"""What one process without any parallel code makes of a composition: plain autograd in float64 on the whole batch.

Of truestep it uses the Decoder's modules alone. Weights, data, loss, clipping and update are written out here anew.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import nn

from tests.parallel.compositions import Composition
from truestep.models.decoder import Decoder
from truestep.numerics.batch import IGNORE, Batch

LR, CLIP_NORM, Z_LOSS = 0.1, 1.0, 1e-2
ORDERS = 3
TINY = 1e-30


@dataclass(frozen=True)
class Step:
    """`loss` and `nll` per target; `gradients` before clipping, `weights` after the update, by name."""

    loss: float
    nll: float
    norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def whole_weights(one: Composition) -> dict[str, torch.Tensor]:
    """Values for every parameter, none of them plain (no zero biases, no unit scales), exact in fp32: element i depends
    on the seed and the name alone."""
    with torch.device("meta"):
        model = Decoder(one.section())
    return {name: _values(name, tuple(p.shape), one) for name, p in model.named_parameters()}


def _values(name: str, shape: tuple[int, ...], one: Composition) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{one.seed} {name}".encode()).digest()[:7], "big")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if len(shape) > 1:
        return x * (0.7 if "embed" in name else shape[-1] ** -0.5)
    return 0.2 * x + (1.0 if "norm" in name and not one.offset else 0.0)


def global_batch(one: Composition, step: int) -> Batch:
    """All rows of one step. Targets are uneven over rows, one row has none, and labels[t] is tokens[t + 1]."""
    random = torch.Generator().manual_seed(1000 * one.seed + step)
    x_BT = torch.randint(0, one.vocab, (one.rows, one.context + 1), generator=random)
    labels_BT = x_BT[:, 1:].clone()
    dropped = torch.linspace(0, 0.9, one.rows)[torch.randperm(one.rows, generator=random)]
    labels_BT[torch.rand(labels_BT.shape, generator=random) < dropped[:, None]] = IGNORE
    labels_BT[min(3, one.rows - 1)] = IGNORE
    place = torch.arange(one.context)[None].expand(one.rows, -1)
    if not one.documents:
        return Batch(x_BT[:, :-1].clone(), labels_BT, place.clone(), torch.zeros_like(place, dtype=torch.int32))
    cut = torch.randint(1, one.context, (one.rows, 1), generator=random)
    cut[0] = one.context // 2  # an edge of documents where context parallelism has one of shards
    documents_BT = (place >= cut).to(torch.int32)
    return Batch(x_BT[:, :-1].clone(), labels_BT, torch.where(place >= cut, place - cut, place), documents_BT)


def whole_model(one: Composition, dtype: torch.dtype = torch.float64) -> Decoder:
    """The model on one device, with the weights of the composition."""
    model = Decoder(one.section()).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, tuple(parameter.shape), one))
    return model


def train(one: Composition, steps: int) -> Iterator[Step]:
    """Plain SGD. The first step is not clipped, so that nothing hides a factor; later ones are, to CLIP_NORM."""
    model = whole_model(one)
    for step in range(steps):
        batch = global_batch(one, step)
        loss, nll = losses(model, batch, one)
        named = dict(model.named_parameters())
        grads = _gradients(model, loss)
        norm = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
        clip = min(1.0, CLIP_NORM / norm) if step else 1.0
        with torch.no_grad():
            for name, parameter in named.items():
                parameter -= LR * clip * grads[name]
        weights = {name: parameter.detach().clone() for name, parameter in named.items()}
        yield Step(loss.item(), nll.item(), norm, grads, weights)


def rounding(one: Composition) -> dict[str, float]:
    """What plain float32 autograd makes of each gradient of the first step at its worst over ORDERS orders of the rows:
    the largest error relative to the largest element. Where sums cancel, this is far above the spacing of floats."""
    exact = next(train(one, 1)).gradients
    batch = global_batch(one, 0)
    worst = dict.fromkeys(exact, 0.0)
    for order in range(ORDERS):
        rows = torch.randperm(one.rows, generator=torch.Generator().manual_seed(order))
        model = whole_model(one, torch.float32)
        loss, _ = losses(model, Batch(*(getattr(batch, f.name)[rows] for f in fields(batch))), one)
        for name, grad in _gradients(model, loss).items():
            worst[name] = max(worst[name], relative(grad, exact[name]))
    return worst


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference relative to the largest element; infinite for what is no number."""
    error = ((found.double() - exact).abs().max() / exact.abs().max().clamp(min=TINY)).item() if exact.numel() else 0.0
    return error if error == error else math.inf


def _gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()))))


def losses(model: nn.Module, batch: Batch, one: Composition) -> tuple[torch.Tensor, torch.Tensor]:
    """(the loss, the part of it that is cross-entropy): means over the targets of the batch."""
    logits_BTV = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    targets_BT = batch.labels_BT != IGNORE
    log_z_N = torch.logsumexp(logits_BTV[targets_BT], -1)
    chosen_N = logits_BTV[targets_BT].gather(1, batch.labels_BT[targets_BT][:, None])[:, 0]
    nll = (log_z_N - chosen_N).sum() / targets_BT.sum()
    z = log_z_N.square().sum() / targets_BT.sum()
    return nll + (Z_LOSS * z if one.z_loss else 0.0), nll
