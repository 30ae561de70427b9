"""Degrees of the mesh."""

import pytest

from truestep.errors import UserError
from truestep.parallel.mesh import Degrees, resolve
from truestep.recipe.machine import Mesh


@pytest.mark.parametrize(
    "mesh,world,degrees",
    [
        (Mesh(), 1, (1, 1)),
        (Mesh(), 6, (1, 6)),
        (Mesh(dp_replicate=2), 6, (2, 3)),
        (Mesh(dp_replicate="auto", dp_shard=2), 6, (3, 2)),
        (Mesh(dp_replicate=4, dp_shard=1), 4, (4, 1)),
    ],
)
def test_degrees_multiply_to_the_world(mesh, world, degrees):
    assert resolve(mesh, world) == Degrees(dp_replicate=degrees[0], dp_shard=degrees[1])


@pytest.mark.parametrize(
    "mesh,world,nearest",
    [
        (Mesh(dp_replicate=2, dp_shard=2), 6, "does is dp_shard = 3."),
        (Mesh(dp_replicate=4), 6, "dp_replicate = 3, dp_shard = 2"),
        (Mesh(dp_replicate=8, dp_shard=1), 4, "does is dp_replicate = 4."),
    ],
)
def test_what_does_not_fit_names_the_nearest_that_does(mesh, world, nearest):
    with pytest.raises(UserError, match=nearest):
        resolve(mesh, world)
