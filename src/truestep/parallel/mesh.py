"""Degrees of the mesh: what [machine.mesh] asks for, made whole numbers that multiply to the world size."""

from dataclasses import dataclass

from truestep.errors import UserError
from truestep.recipe.machine import Mesh


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis; their product is the world size."""

    dp_replicate: int
    dp_shard: int

    @property
    def data_parallel(self) -> int:
        return self.dp_replicate * self.dp_shard


def resolve(mesh: Mesh, world: int) -> Degrees:
    """Fill in the "auto" degree. Raises UserError naming the nearest mesh where the degrees do not multiply."""
    asked = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    fixed = 1
    for degree in asked.values():
        fixed *= degree if isinstance(degree, int) else 1
    autos = [axis for axis, degree in asked.items() if degree == "auto"]
    if autos and world % fixed == 0:
        asked[autos[0]] = world // fixed
    elif autos or fixed != world:
        nearest = max(d for d in range(1, world + 1) if world % d == 0 and d <= max(fixed, 1))
        shown = ", ".join(f"{axis} = {degree}" for axis, degree in asked.items())
        raise UserError(
            f"machine.mesh ({shown}) does not fit {world} processes; the nearest mesh that does is "
            f"dp_replicate = {nearest}, dp_shard = {world // nearest}"
        )
    return Degrees(**{axis: int(degree) for axis, degree in asked.items()})
