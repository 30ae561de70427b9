"""With which numbers of processes a run can go on, its global batch unchanged. Torch-free."""

from dataclasses import dataclass

from truestep.recipe.batch_schedule import step_rows
from truestep.recipe.check_mesh import Limits, asked_of, faults, fill
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import TRAINED


@dataclass(frozen=True)
class Worlds:
    """`recipe.machine.mesh` says which degrees are fixed: the world is a multiple of their product, and where none is
    open there is one world only. A global batch is a whole number of microbatches, dealt out anew to any number of
    groups of ranks; a world with more groups than a step has microbatches is not grown into, since it wins nothing."""

    recipe: Recipe
    begun: int
    """Processes that somebody asked for: they are taken even where some of them work on padding."""

    def fit(self, world: int) -> bool:
        """Whether the mesh can be on `world` processes."""
        limits = Limits.of(self.recipe)
        full = fill(asked_of(self.recipe.machine.mesh), limits, world)
        if full is None or any(True for _ in faults(full, limits)):
            return False
        return world <= self.begun or full["dp_replicate"] * full["dp_shard"] <= self._fewest_microbatches

    @property
    def _fewest_microbatches(self) -> int:
        rows = self.recipe.machine.microbatch_rows
        return min(step_rows(stage)[0] // rows for stage in self.recipe.stages if stage.kind in TRAINED)
