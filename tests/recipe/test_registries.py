"""The names that a recipe may use are those that the parts know."""

from truestep.data.sources import registry
from truestep.losses import base
from truestep.optim import build
from truestep.recipe import data, stage


def test_names_are_those_of_the_registries():
    assert set(data.SOURCES) == set(registry.SOURCES)
    assert set(stage.TRAINED) == set(base.LOSSES)
    assert set(stage.OPTIMIZERS) == set(build.OPTIMIZERS)
