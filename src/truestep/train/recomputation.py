"""Which blocks recompute their activations, where the recipe leaves that to a budget of memory."""

from torch import nn

from truestep.errors import UserError
from truestep.models.decoder import Decoder
from truestep.plan.activations import Recompute
from truestep.plan.memory import recomputation
from truestep.plan.setup import Setup
from truestep.recipe.batch_schedule import step_rows
from truestep.recipe.degrees import Degrees
from truestep.recipe.machine import Machine
from truestep.recipe.stage import Stage


def recomputed(
    model: nn.Module, stage: Stage, machine: Machine, degrees: Degrees, precision: str, head_chunk_tokens: int
) -> dict[int, Recompute]:
    """The mode of every block by its number in the whole model, on every rank of the pipeline: with "auto" as little
    as lets activations of a rank fit into machine.activation_memory, as `truestep plan` counts them. Empty for a module
    of the user's own, whose blocks all have the mode that the recipe says."""
    if not isinstance(model, Decoder):
        if machine.activation_checkpointing == "auto":
            raise UserError(
                'machine.activation_checkpointing is "auto", but what the blocks of a module of your own keep is not '
                'known; choose "none" or "full"'
            )
        return {}
    _, rows = step_rows(stage)
    here = machine.model_copy(update={"precision": precision, "head_chunk_tokens": head_chunk_tokens})
    setup = Setup(model.section, degrees, here, stage, rows)
    return {layer: mode for rank in range(degrees.pp) for layer, mode in recomputation(setup, rank).items()}
