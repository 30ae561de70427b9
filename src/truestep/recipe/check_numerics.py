"""What [numerics] asks of the model."""

from collections.abc import Iterator

from truestep.recipe.model import ModelSection
from truestep.recipe.numerics import Numerics
from truestep.recipe.problems import Problem


def numerics_problems(numerics: Numerics, model: ModelSection | None) -> Iterator[Problem]:
    """`model`: the recipe's own, or the one that a stage starts from where it is known."""
    low, at = numerics.low_precision, "numerics.low_precision"
    if low is None or model is None:
        return
    if model.module is not None:
        text = "is set, but a model of your own computes its products itself; remove it, or leave out model.module."
        yield Problem(at, text, ("model.module",))
        return
    num = model.num_layers
    if num is not None and not any(low.is_low_layer(layer, num) for layer in range(num)):
        first, last = low.high_first, low.high_last
        held = f"{first} first and {last} last" if last is not None else f"{first} first and the last 15 %"
        text = f"keeps every block high: {held} of model.num_layers = {num}; leave at least one between them."
        yield Problem(at, text, ("model.num_layers", f"{at}.high_first", f"{at}.high_last"))
