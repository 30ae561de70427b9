"""Which experts a token goes to and with what weights; how the choices are kept even, and what is counted of them.

N tokens, E experts, K choices of a token. All of it is computed in fp32 at least, whatever the rest is in, since a
rounded score flips choices. Where scores are equal, the expert with the lower number is chosen.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from truestep.recipe.moe import Moe


class Router(nn.Module):
    """Scores of the experts are softmax(W x) or sigmoid(W x); the K best of scores + bias are chosen, among the best
    groups of experts where there are groups; the scores of the chosen ones (without the bias), made to sum to 1 where
    the section says so, times a factor, are the weights.

    `load`: how often each expert was chosen in the step before by the whole global batch. `bias`: see `update`. Between
    `begin` and `update` every forward pass counts its tokens, but for padding and for recomputation.
    """

    weight: nn.Parameter
    bias: torch.Tensor | None
    load: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor
    factors: torch.Tensor

    def __init__(self, moe: Moe, hidden_size: int, has_bias: bool):
        super().__init__()
        self.moe = moe
        experts = moe.num_experts
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self.register_buffer("bias", torch.zeros(experts) if has_bias else None)
        remembers = moe.balance == "aux" and moe.counts == "previous"
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=remembers)
        # of this step and this rank: choices of each expert and number of padding tokens; sums over tokens of the
        # probabilities, their entropy, and logsumexp(logits)^2
        self.register_buffer("counts", torch.zeros(experts + 1, dtype=torch.int64), persistent=False)
        self.register_buffer("sums", torch.zeros(experts + 2, dtype=torch.float64), persistent=False)
        # 1 / tokens of the global batch, and the factor on the gradients of the losses
        self.register_buffer("factors", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.counting = False

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Router":
        """Moves and casts go through here. Nothing gets narrower than fp32, and buffers that come from the meta device
        (where they lose their values) start at 0."""

        def kept(x: torch.Tensor) -> torch.Tensor:
            y = fn(x)
            narrow = y.is_floating_point() and y.dtype != x.dtype and y.dtype.itemsize < 4
            return x.to(y.device) if narrow else y

        was_meta = self.load.is_meta
        super()._apply(kept, recurse)
        if was_meta and not self.load.is_meta:
            for buffer in self.buffers(recurse=False):
                buffer.zero_()
        return self

    def forward(self, x_ND: torch.Tensor, real_N: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(experts_NK, weights_NK), the best expert first. `real_N` is false for padding; None: there is none."""
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = linear(x_ND.to(wide), self.weight.to(wide))
            scores_NE = logits_NE.softmax(-1) if self.moe.scoring == "softmax" else logits_NE.sigmoid()
            experts_NK = self.choose(scores_NE.detach())
            weights_NK = scores_NE.gather(1, experts_NK)
            if self.moe.normalise:
                weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
            if self.moe.scale != 1.0:
                weights_NK = weights_NK * self.moe.scale
            if self.counting:
                weights_NK = self._counted(logits_NE, scores_NE, experts_NK, weights_NK, real_N)
        return experts_NK, weights_NK

    @torch.no_grad()
    def choose(self, scores_NE: torch.Tensor) -> torch.Tensor:
        """experts_NK. Of G groups of experts, those with the largest sums of their two best scores are open."""
        choice_NE = scores_NE if self.bias is None else scores_NE + self.bias
        if self.moe.groups > 1:
            by_group = choice_NE.unflatten(1, (self.moe.groups, -1))
            groups = _best(by_group.topk(2, dim=-1).values.sum(-1), self.moe.top_groups)
            closed = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, groups, False)
            choice_NE = by_group.masked_fill(closed[..., None], float("-inf")).flatten(1)
        return _best(choice_NE, self.moe.top_k)

    def _counted(
        self,
        logits_NE: torch.Tensor,
        scores_NE: torch.Tensor,
        experts_NK: torch.Tensor,
        weights_NK: torch.Tensor,
        real_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """The weights, with the gradients of the router's losses on them; statistics of the tokens are taken."""
        moe = self.moe
        probs_NE = scores_NE if moe.scoring == "softmax" else scores_NE / (scores_NE.sum(-1, keepdim=True) + 1e-20)
        square_N = logits_NE.logsumexp(-1).square()
        if real_N is None:
            real_N = torch.ones(len(logits_NE), dtype=torch.bool, device=logits_NE.device)
        probs_E, square = (probs_NE * real_N[:, None]).sum(0), (square_N * real_N).sum()
        if not is_recomputation():
            self._take(probs_NE.detach(), probs_E.detach(), square.detach(), experts_NK, real_N)
        losses = [self.balance_loss(probs_E)] if moe.balance == "aux" else []
        losses += [square * moe.z_loss] if moe.z_loss else []
        if not losses or not torch.is_grad_enabled():
            return weights_NK
        inverse, factor = self.factors.to(square.dtype)
        return _Attach.apply(weights_NK, sum(losses) * inverse, factor)  # pyright: ignore[reportReturnType]

    def balance_loss(self, probs_E: torch.Tensor) -> torch.Tensor:
        """coefficient E sum_e f_e p_e (arXiv 2101.03961, equation 4), f the share of `load` of each expert: without a
        load an equal one. Of sums of probabilities over tokens it is the sum over tokens."""
        total = self.load.sum()
        load_E = self.load.to(probs_E.dtype)  # of whole numbers torch makes a quotient in fp32
        share_E = torch.where(total > 0, load_E / total.clamp(min=1), 1 / len(load_E))
        return self.moe.balance_coefficient * len(load_E) * (share_E * probs_E).sum()

    @torch.no_grad()
    def _take(
        self,
        probs_NE: torch.Tensor,
        probs_E: torch.Tensor,
        square: torch.Tensor,
        experts_NK: torch.Tensor,
        real_N: torch.Tensor,
    ) -> None:
        ones_NK = real_N[:, None].expand_as(experts_NK).to(torch.int64)
        self.counts[:-1].scatter_add_(0, experts_NK.flatten(), ones_NK.flatten())
        self.counts[-1] += (~real_N).sum()
        entropy = -(torch.special.xlogy(probs_NE, probs_NE) * real_N[:, None]).sum()
        self.sums += torch.cat((probs_E, entropy[None], square[None]))

    def begin(self, tokens: int, scale: float) -> None:
        """A step begins, whose global batch has `tokens` tokens that are no padding; gradients are to come out times
        `scale`."""
        self.clear()
        self.factors[0].fill_(1 / max(tokens, 1))
        self.factors[1].fill_(scale)
        self.counting = True

    def clear(self) -> None:
        """Forget what was counted."""
        self.counts.zero_()
        self.sums.zero_()

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor) -> None:
        """Take up the `counts_E` choices of a global batch. The bias of an expert that was chosen less often than the
        mean goes up by `bias_rate`, else down (arXiv 2408.15664, algorithm 1): whole numbers are compared."""
        self.load.copy_(counts_E)
        if self.bias is not None and self.moe.balance == "bias":
            short_E = torch.sign(counts_E.sum() - len(counts_E) * counts_E)
            self.bias += self.moe.bias_rate * short_E.to(self.bias.dtype)


def is_recomputation() -> bool:
    """Whether this forward pass runs inside a backward pass, as activation checkpointing has it."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]  # nothing public says so


def take_counts(routers: Sequence[Router], sum_over: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """After a pre-pass over the step's microbatches: their counts become the load that balance losses go by, and
    counting begins anew. `sum_over` sums over the ranks that saw different tokens; so it does below."""
    total = sum_over(torch.stack([router.counts for router in routers]))
    for router, counts in zip(routers, total):
        router.load.copy_(counts[:-1])
        router.clear()


@torch.no_grad()
def end_step(
    routers: dict[int, Router], sum_over: Callable[[torch.Tensor], torch.Tensor], update: bool = True
) -> dict[str, float]:
    """End a step of the routers by layer. Loads and biases are updated from the counts of all ranks (not so in a step
    without an update). Returns for the run log, of each layer, the largest load over the mean load, the mean entropy of
    the probabilities in nats, and the mean losses of the router with their factors; dropped tokens (never one) and
    padding tokens of all layers."""
    if not routers:
        return {}
    counts = sum_over(torch.stack([router.counts for router in routers.values()]))
    sums = sum_over(torch.stack([router.sums for router in routers.values()]))
    rows = []
    for router, counts_E, sums_E in zip(routers.values(), counts[:, :-1], sums):
        tokens = (counts_E.sum() / router.moe.top_k).clamp(min=1)
        mean = counts_E.double().mean().clamp(min=1e-9)
        balance, square = router.balance_loss(sums_E[:-2]), sums_E[-1] * router.moe.z_loss
        rows.append(torch.stack((counts_E.max() / mean, sums_E[-2] / tokens, balance / tokens, square / tokens)))
        router.counting = False
        if update:
            router.update(counts_E)
    metrics: dict[str, float] = {}
    for (layer, router), row in zip(routers.items(), torch.stack(rows).tolist()):
        wanted = (True, True, router.moe.balance == "aux", router.moe.z_loss > 0)
        names = (f"experts.{layer}.{name}" for name in ("load", "entropy", "balance_loss", "z_loss"))
        metrics |= {name: value for name, value, want in zip(names, row, wanted) if want}
    return metrics | {"experts.dropped": 0.0, "experts.padding": float(counts[:, -1].sum())}


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest in each row, the largest first; of equal ones the first (unlike topk)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class _Attach(torch.autograd.Function):
    """Gives back `x`. In backward, `loss` gets the gradient `factor`, as if it had been added to the job's loss; so it
    works on every pipeline stage."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grads[0], ctx.saved_tensors[0], None
