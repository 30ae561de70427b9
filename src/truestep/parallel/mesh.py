"""Degrees of the mesh: what [machine.mesh] asks for, made whole numbers that multiply to the world size. Torch-free."""

from truestep.recipe.check_mesh import Limits, degrees
from truestep.recipe.degrees import Coordinate, Degrees
from truestep.recipe.machine import Mesh

__all__ = ["Coordinate", "Degrees", "Limits", "resolve"]


def resolve(mesh: Mesh, world: int, limits: Limits | None = None) -> Degrees:
    """The mesh on `world` processes, its "auto" degree filled in.

    Raises UserError, with the nearest mesh that can be, where degrees do not multiply to the world, or where `limits`
    (`Limits.of(recipe, model)`) do not allow them."""
    return degrees(mesh, limits or Limits(), world)
