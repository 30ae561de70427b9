"""What one process without any parallel code makes of a composition: plain autograd in float64 on the whole batch.

Of truestep it uses the Decoder's modules alone. Weights, data, loss, clipping and update are written out here anew.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.parallel.compositions import Composition
from truestep.models.decoder import Decoder
from truestep.models.router import Router
from truestep.numerics.batch import IGNORE, Batch
from truestep.recipe.model import ModelSection

LR, ADAM_LR, BETAS, EPS, CLIP_NORM, Z_LOSS = 0.1, 1e-3, (0.9, 0.95), 1e-8, 1.0, 1e-2
MARGIN, ORDERS, TINY = 1e-4, 3, 1e-30


@dataclass(frozen=True)
class Step:
    """`loss` (as it is reported: without the losses of routers) and `nll` per target; `gradients` before clipping,
    `weights` and buffers after the update, by name. `attempt`: which draw of the batch it took, see `train`."""

    attempt: int
    loss: float
    nll: float
    norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def whole_weights(one: Composition, section: ModelSection | None = None) -> dict[str, torch.Tensor]:
    """Values for every parameter and buffer, none of them plain (no zero biases, no unit scales, no even loads), exact
    in fp32: each depends on the seed and the name alone."""
    with torch.device("meta"):
        model = Decoder(section or one.section())
    return {name: _values(name, tuple(x.shape), one) for name, x in model.state_dict().items()}


def _values(name: str, shape: tuple[int, ...], one: Composition) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(f"{one.seed} {name}".encode()).digest()[:7], "big")
    random = torch.Generator().manual_seed(seed)
    if name.endswith("router.load"):
        return torch.randint(1, 50, shape, generator=random)
    x = torch.randn(shape, generator=random)
    if name.endswith("router.bias"):
        return 0.05 * x
    if len(shape) > 1:
        return x * (0.7 if "embed" in name else shape[-1] ** -0.5)
    return 0.2 * x + (1.0 if "norm" in name and not one.offset else 0.0)


def global_batch(one: Composition, step: int, attempt: int) -> Batch:
    """All rows of one step. Targets are uneven over rows, one row has none, and labels[t] is tokens[t + 1]."""
    random = torch.Generator().manual_seed(10**6 * one.seed + 1000 * step + attempt)
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


def whole_model(one: Composition, dtype: torch.dtype = torch.float64, section: ModelSection | None = None) -> Decoder:
    """The model on one device, with the weights of the composition."""
    model = Decoder(section or one.section()).to(dtype)
    with torch.no_grad():
        for name, x in model.state_dict().items():
            x.copy_(_values(name, tuple(x.shape), one))
    return model


def train(one: Composition, steps: int) -> Iterator[Step]:
    """Plain SGD, or Adam without decay. The first step is not clipped, so that nothing hides a factor; later ones are,
    to CLIP_NORM. A batch is drawn anew where a token's choice of experts is closer than MARGIN, since rounding may turn
    that."""
    model = whole_model(one)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for step in range(steps):
        for attempt in range(100):
            batch = global_batch(one, step, attempt)
            losses = run(model, batch, one)
            if losses.margin >= MARGIN:
                break
        grads = _gradients(model, losses.total)
        norm = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
        clip = min(1.0, CLIP_NORM / norm) if step else 1.0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                change = clip * grads[name]
                parameter -= LR * change if one.optimizer == "sgd" else _adam(moments[name], change, step + 1)
        for router, counts_E in losses.counts:
            _update(router, counts_E)
        weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
        yield Step(attempt, losses.reported.item(), losses.nll.item(), norm, grads, weights)


def _adam(moments: tuple[torch.Tensor, torch.Tensor], grad: torch.Tensor, count: int) -> torch.Tensor:
    """What to subtract (arXiv 1412.6980, algorithm 1)."""
    for moment, beta, value in zip(moments, BETAS, (grad, grad.square())):
        moment.mul_(beta).add_(value, alpha=1 - beta)
    first, second = (moment / (1 - beta**count) for moment, beta in zip(moments, BETAS))
    return ADAM_LR * first / (second.sqrt() + EPS)


@dataclass
class Losses:
    """Means over the targets: `nll`, `reported` (with the z-loss); `total` has the losses of routers too. `margin`: the
    closest choice of experts; `counts`: of each router, how often each expert was chosen."""

    nll: torch.Tensor
    reported: torch.Tensor
    total: torch.Tensor
    margin: float = math.inf
    counts: list[tuple[Router, torch.Tensor]] = field(default_factory=list)


def run(model: nn.Module, batch: Batch, one: Composition) -> Losses:
    """The losses of one batch by plain formulas, from the model's logits and from what went into its routers."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    given: dict[Router, torch.Tensor] = {}
    hooks = [router.register_forward_pre_hook(lambda own, args: given.update({own: args[0]})) for router in routers]
    logits_BTV = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    for hook in hooks:
        hook.remove()
    targets_BT = batch.labels_BT != IGNORE
    log_z_N = torch.logsumexp(logits_BTV[targets_BT], -1)
    chosen_N = logits_BTV[targets_BT].gather(1, batch.labels_BT[targets_BT][:, None])[:, 0]
    nll = (log_z_N - chosen_N).sum() / targets_BT.sum()
    reported = nll + (Z_LOSS * log_z_N.square().sum() / targets_BT.sum() if one.z_loss else 0.0)
    losses = Losses(nll, reported, reported)
    for router in routers:
        _route(router, given[router], losses)
    return losses


def _route(router: Router, x_ND: torch.Tensor, losses: Losses) -> None:
    """Add a router's losses: coefficient E sum(f p), and factor mean(logsumexp(logits)^2), over all tokens."""
    moe, num_experts = router.moe, router.moe.num_experts
    logits_NE = x_ND @ router.weight.T
    scores_NE = logits_NE.softmax(-1) if moe.scoring == "softmax" else logits_NE.sigmoid()
    choice_NE = scores_NE.detach() + (0 if router.bias is None else router.bias)
    if moe.groups > 1:
        best_NG = choice_NE.unflatten(1, (moe.groups, -1)).topk(2).values.sum(-1)
        losses.margin = min(losses.margin, _margin(best_NG, moe.top_groups))
        open_NG = torch.zeros_like(best_NG).scatter_(1, best_NG.topk(moe.top_groups).indices, 1.0)
        is_open_NE = open_NG.repeat_interleave(num_experts // moe.groups, 1) > 0
        choice_NE = torch.where(is_open_NE, choice_NE, -math.inf)
    losses.margin = min(losses.margin, _margin(choice_NE, moe.top_k))
    counts_E = torch.bincount(choice_NE.topk(moe.top_k).indices.flatten(), minlength=num_experts)
    losses.counts.append((router, counts_E))
    if moe.balance == "aux":
        load_E = (counts_E if moe.counts == "pre-pass" else router.load).double()
        share_E, prob_E = load_E / load_E.sum(), (scores_NE / scores_NE.sum(-1, keepdim=True)).mean(0)
        losses.total = losses.total + moe.balance_coefficient * num_experts * (share_E * prob_E).sum()
    losses.total = losses.total + moe.z_loss * logits_NE.logsumexp(-1).square().mean()


def _margin(scores: torch.Tensor, count: int) -> float:
    """How far the last chosen is before the first that is not, in the row where they are closest."""
    if scores.shape[1] == count:
        return math.inf
    best = scores.topk(count + 1).values
    return (best[:, -2] - best[:, -1]).min().item()


@torch.no_grad()
def _update(router: Router, counts_E: torch.Tensor) -> None:
    """What a router remembers of a step: the counts, and the bias of arXiv 2408.15664, algorithm 1."""
    router.load.copy_(counts_E)
    if router.moe.balance == "bias":
        assert router.bias is not None
        router.bias += router.moe.bias_rate * torch.sign(counts_E.double().mean() - counts_E)


def rounding(one: Composition) -> dict[str, float]:
    """What plain float32 autograd makes of each gradient of the first step, of its losses and of the norm, at its worst
    over ORDERS orders of the rows: the largest error relative to the largest element. Where sums cancel, this is far
    above the spacing of floats."""
    exact = next(train(one, 1))
    batch = global_batch(one, 0, exact.attempt)
    wanted = exact.gradients | _figures(exact.loss, exact.nll, exact.norm)
    worst = dict.fromkeys(wanted, 0.0)
    for order in range(ORDERS):
        rows = torch.randperm(one.rows, generator=torch.Generator().manual_seed(order))
        model = whole_model(one, torch.float32)
        losses = run(model, batch.map(lambda x, rows=rows: x[rows]), one)
        grads = _gradients(model, losses.total)
        norm = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
        found = grads | _figures(losses.reported.item(), losses.nll.item(), norm)
        worst = {name: max(error, relative(found[name], wanted[name])) for name, error in worst.items()}
    return worst


def _figures(loss: float, nll: float, norm: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in (("loss", loss), ("nll", nll), ("norm", norm))}


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference relative to the largest element; infinite for what is no number."""
    error = ((found.double() - exact).abs().max() / exact.abs().max().clamp(min=TINY)).item() if exact.numel() else 0.0
    return error if error == error else math.inf


def _gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values()))))
