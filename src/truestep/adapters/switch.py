"""Which of a model's adapters are in use: none for a while, or some by name, each with a factor."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from truestep.errors import UserError
from truestep.numerics.low_rank import adapted_modules


@contextmanager
def off(*models: nn.Module) -> Iterator[None]:
    """Inside, the models (or the parts of one) compute as if they had no adapters: what a preference stage's reference
    is. Afterwards, also when the body raises, everything is as it was."""
    adapted = adapted_modules(*models)
    before = [one.on for one in adapted]
    try:
        for one in adapted:
            one.on = False
        yield
    finally:
        for one, was in zip(adapted, before):
            one.on = was


def names(*models: nn.Module) -> list[str]:
    """Of the adapters that some weight has."""
    return list(dict.fromkeys(name for one in adapted_modules(*models) for name in one))


def choose(factors: Mapping[str, float], *models: nn.Module) -> None:
    """Use these adapters from now on, their products added up with these factors; UserError for one that is not there.
    An adapter need not be at every weight."""
    there = names(*models)
    for name in factors:
        if name not in there:
            raise UserError(f"there is no adapter {name!r}; the model has {', '.join(there) or 'none'}.")
    for one in adapted_modules(*models):
        one.factors = {name: factor for name, factor in factors.items() if name in one}
