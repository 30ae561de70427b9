"""What a plan is about: a resolved model on a mesh, and what a step of one stage puts through it."""

from dataclasses import dataclass
from functools import cached_property

from truestep.plan.activations import Recompute
from truestep.plan.schedule import in_flight, microbatches
from truestep.plan.split import stage_layers, stages_of_rank
from truestep.recipe.degrees import Degrees
from truestep.recipe.machine import Machine
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Setup:
    """`rows`: rows of a step over all ranks."""

    model: ModelSection
    degrees: Degrees
    machine: Machine
    stage: Stage
    rows: int

    @property
    def precision(self) -> str:
        """The compute dtype. What "auto" will measure is taken to be bfloat16, but for a CPU."""
        if self.machine.precision != "auto":
            return self.machine.precision
        return "float32" if self.machine.device == "cpu" else "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of a number of activations and of gathered weights."""
        return _ITEMSIZE[self.precision]

    @property
    def wide(self) -> int:
        """Bytes of a number of master weights, gradients and optimizer state."""
        return max(4, self.itemsize)

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the weights. Plain replicas are kept by DDP, a single copy by nobody."""
        return self.degrees.by_fsdp(experts=self.model.moe is not None)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, over all ranks of cp and tp."""
        return self.machine.microbatch_rows * self.stage.context

    @cached_property
    def microbatches(self) -> int:
        """Microbatches that each rank takes in a step, with those that fill up."""
        wanted = -(-self.rows // (self.machine.microbatch_rows * self.degrees.data_parallel))
        return microbatches(self.machine.pipeline.schedule, self.degrees.pp, wanted) if self.degrees.pp > 1 else wanted

    @property
    def filled(self) -> float:
        """The share of the microbatches' rows that are rows of the batch."""
        return self.rows / (self.microbatches * self.machine.microbatch_rows * self.degrees.data_parallel)

    @property
    def per_rank(self) -> int:
        """Pipeline stages on a rank."""
        return self.machine.pipeline.stages_on_a_rank if self.degrees.pp > 1 else 1

    @cached_property
    def layers(self) -> list[range]:
        """Blocks of each pipeline stage."""
        return stage_layers(self.model, self.machine.pipeline, self.degrees.pp, self.stage.context)

    def held(self, rank: int) -> list[int]:
        """Pipeline stages on a rank of the pipeline axis."""
        return stages_of_rank(self.machine.pipeline.schedule, self.degrees.pp, self.per_rank, rank)

    def in_flight(self, rank: int) -> float:
        """Microbatches whose activations in all its blocks a rank of the pipeline axis holds at a time."""
        schedule, pp = self.machine.pipeline.schedule, self.degrees.pp
        return in_flight(schedule, pp, self.per_rank, self.microbatches, rank) / self.per_rank

    @property
    def recompute(self) -> Recompute | None:
        """The mode of all blocks; None where each has its own ("auto")."""
        mode = self.machine.activation_checkpointing
        return None if mode == "auto" else mode
