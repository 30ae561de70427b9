"""The seam of losses: a sum over targets and the weight that it will be divided by.

The weight of the whole global batch is known from the data's masks before the forward pass, so the training loop
divides every microbatch's sum by one global number; a loss never takes a mean itself. Masks that depend on the
forward pass zero terms of the sum and leave the weight alone.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from truestep.errors import UserError
from truestep.imports import is_import_path, load_object
from truestep.numerics.batch import Batch
from truestep.numerics.head import HeadInput, Logits, OwnLoss
from truestep.recipe.stage import Loss as LossSection
from truestep.recipe.stage import Stage


@dataclass(frozen=True)
class LossSum:
    """`sum`: scalar in nats, fp32 at least, attached to the graph. `metrics`: detached scalar sums over the same
    targets."""

    sum: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        if self.sum.ndim or self.sum.dtype not in (torch.float32, torch.float64):
            raise UserError(
                f"a loss returned a sum of shape {tuple(self.sum.shape)} in {self.sum.dtype}; "
                f"add up the targets into one float32 or float64 number."
            )


@runtime_checkable
class Loss(Protocol):
    """A loss counts its targets from the masks of a batch, and sums over them."""

    def weight(self, batch: Batch) -> int | float:
        """Targets, or what else counts, of a CPU batch, from its masks and columns alone; the sum over all ranks and
        microbatches of a step is the divisor."""
        ...

    def __call__(self, out: HeadInput | Logits | OwnLoss, batch: Batch) -> LossSum:
        """The sum over the targets of `batch`. No target: sum 0 with gradient 0. OwnLoss comes from a user's own module
        that gives no logits."""
        ...


LOSSES: dict[str, str] = {
    "pretrain": "truestep.losses.cross_entropy:of_stage",
    "sft": "truestep.losses.sft:of_stage",
    "preference": "truestep.losses.preference:of_stage",
    "reward_model": "truestep.losses.reward:of_stage",
    "distill": "truestep.losses.distill:of_stage",
}
"""What makes the loss of a kind of stage: (stage, rows of logits held at a time) -> Loss. A new one is one new file
with a class that follows `Loss`, and one line here; a loss of the user's own needs no line: the recipe names it by
import path, and `options` are its keyword arguments."""


def open_loss(stage: Stage, head_chunk_tokens: int) -> Loss:
    """The loss that a stage asks for. `head_chunk_tokens`: rows of logits held at a time by losses that fuse the head.
    Raises UserError for an unknown name, a wrong import path, and options that would not be used."""
    section = stage.loss
    if is_import_path(section.kind):
        return _own_loss(section)
    if section.kind != "cross-entropy":
        raise UserError(f'loss.kind {section.kind!r} is unknown; write cross-entropy, or "package.module:Class".')
    if section.options:
        names = ", ".join(section.options)
        raise UserError(f"loss.options ({names}) would not be used by {section.kind!r}; remove them.")
    return load_object(LOSSES[stage.kind], "loss")(stage, head_chunk_tokens)


def _own_loss(section: LossSection) -> Loss:
    if section.z_loss:
        raise UserError(
            f"loss.z_loss = {section.z_loss} would not be used by {section.kind!r}; put it in loss.options."
        )
    factory = load_object(section.kind, "loss")
    try:
        loss = factory(**section.options)
    except TypeError as error:
        raise UserError(f"loss {section.kind!r} does not take loss.options {section.options}: {error}.") from error
    if not isinstance(loss, Loss):
        raise UserError(f"loss {section.kind!r} lacks weight(batch) or __call__(out, batch); see truestep.losses.base.")
    return loss
