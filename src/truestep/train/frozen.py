"""A second model beside the one that is trained, on the same mesh: a teacher, or what is not to be forgotten. It has no
gradients and no optimizer, and no checkpoint holds it: it comes from a model directory in every attempt."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from truestep.numerics.batch import Batch
from truestep.numerics.head import HeadInput
from truestep.numerics.precision import DTYPES
from truestep.parallel.apply import Fill, is_small, parallelize
from truestep.parallel.mesh import Limits, resolve
from truestep.parallel.model import Parallel
from truestep.recipe.machine import Machine
from truestep.train.build import pipeline_settings


@dataclass(frozen=True)
class Frozen:
    """`parallel` is made of parameters that take no gradient."""

    parallel: Parallel

    def head_input(self, batch: Batch) -> HeadInput | None:
        """What the model hands to a loss, of this rank's part of a microbatch; hidden states in the dtype of products.
        None where this rank does not have the head. Collective, as a forward pass of the trained model is. The output
        matrix is the live one: it may be gone after anything else is asked of `parallel`."""
        return self.parallel.evaluate(batch, as_products)


def as_products(out: HeadInput) -> HeadInput:
    """The same, hidden states in the dtype that products have where this is called."""
    device = out.hidden_BTD.device.type
    if torch.is_autocast_enabled(device):
        hidden_BTD = out.hidden_BTD.to(torch.get_autocast_dtype(device))
        return replace(out, hidden_BTD=hidden_BTD)
    return out


class TakesHead(Protocol):
    """A loss that makes another model's logits itself, from a column of hidden states and this head."""

    head: HeadInput | None


@dataclass(frozen=True)
class HiddenStates:
    """Adds a frozen model's last hidden states to a microbatch as a column, on ranks with the head, and gives `loss`
    the output matrix that belongs to them (one of truestep.train.state's `before`)."""

    model: Frozen
    column: str
    loss: TakesHead

    def __call__(self, batch: Batch) -> Batch:
        out = self.model.head_input(batch)
        if out is None:
            return batch
        self.loss.head = replace(out, hidden_BTD=out.hidden_BTD[:0])
        return replace(batch, columns={**batch.columns, self.column: out.hidden_BTD})


def freeze(
    model: nn.Module, fill: Fill, beside: Parallel, *, machine: Machine, precision: str, context: int, limits: Limits
) -> Frozen:
    """`model`, on the meta device, laid over the ranks of `beside` and filled by `fill(model, pieces)`.

    Matrices are held in the dtype of products, `precision`, to which they would be cast anyway; normalisations, offsets
    and routers in float32. `limits`: of this model (Limits.of). Raises UserError for a mesh that it does not allow."""
    groups, dtype = beside.groups, DTYPES[precision]
    degrees = resolve(machine.mesh, groups.world.size, limits)
    roles = model.roles()  # pyright: ignore[reportCallIssue]
    if precision == "float64":
        model.double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if not is_small(roles[name], tuple(parameter.shape)):
            parameter.data = parameter.data.to(dtype)
    even = machine.model_copy(update={"pipeline": machine.pipeline.model_copy(update={"split": "auto"})})
    parallel = parallelize(
        model,
        degrees,
        device=beside.device,
        dtype=dtype,
        fill=fill,
        reshard_after_forward=machine.reshard_after_forward,
        context=machine.context,
        pipeline=pipeline_settings(model, even, degrees.pp, context),
        groups=groups,
    )
    for part in parallel.parts:
        part.eval()
    return Frozen(parallel)
