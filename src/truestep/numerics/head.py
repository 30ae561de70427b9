"""What a model hands to a loss: the last hidden states and the output matrix, or finished logits."""

from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear

from truestep.errors import ModelError
from truestep.numerics.axis import Axis
from truestep.numerics.pieces import span


@dataclass(frozen=True)
class HeadInput:
    """hidden_BTD after the last normalisation; weight_VD, a plain tensor (unsharded at forward time) in the dtype of
    the hidden states or wider; softcap c replaces a logit x by c·tanh(x / c). A loss that never needs all logits at
    once takes the two factors; `logits` is for everybody else.

    `vocab`: the axis over which rows of the matrix are split; this rank has those from `first_row` on, of vocab_size.
    `backward_twice`: the backward pass of inputs and that of weights run apart (zero-bubble pipelines). `places`: the
    axis over which the places of rows are split, for losses that add them up."""

    hidden_BTD: torch.Tensor
    weight_VD: torch.Tensor
    softcap: float | None = None
    vocab: Axis = field(default_factory=lambda: Axis("tp"))
    first_row: int = 0
    vocab_size: int = 0
    backward_twice: bool = False
    places: Axis = field(default_factory=lambda: Axis("cp"))

    def logits(self) -> torch.Tensor:
        """logits_BTV of the whole vocabulary, in fp32 (float64 stays float64)."""
        product_BTV = linear(self.hidden_BTD, self.weight_VD.to(self.hidden_BTD.dtype))
        spans = [span(self.vocab_size, self.vocab.size, rank) for rank in range(self.vocab.size)]
        product_BTV = self.vocab.collect(product_BTV, -1, [stop - start for start, stop in spans])
        logits_BTV = product_BTV.to(torch.promote_types(product_BTV.dtype, torch.float32))
        return logits_BTV if self.softcap is None else self.softcap * torch.tanh(logits_BTV / self.softcap)


@dataclass(frozen=True)
class Logits:
    """The output of a model that computes its logits itself."""

    logits_BTV: torch.Tensor

    def logits(self) -> torch.Tensor:
        """logits_BTV in fp32 (float64 stays float64)."""
        return self.logits_BTV.to(torch.promote_types(self.logits_BTV.dtype, torch.float32))


@dataclass(frozen=True)
class Scores:
    """The output of a reward model: scores_BT of what a row holds up to and with each place, in fp32 at least. Every
    rank of the tensor axis has those of all places, and goes on to compute the same from them."""

    scores_BT: torch.Tensor

    def logits(self) -> torch.Tensor:
        """Always a ModelError: for what takes it for a model of text."""
        raise ModelError("this is a reward model: it gives scores and no logits; take a model with a vocabulary head.")


@dataclass(frozen=True)
class OwnLoss:
    """The output of a user's own module that computes its loss itself: the sum over its targets, in nats."""

    sum: torch.Tensor

    def logits(self) -> torch.Tensor:
        """Always a ModelError: for what needs more than the loss, such as evaluation."""
        raise ModelError("the model returns a loss without logits, but they are needed here; return .logits as well.")
