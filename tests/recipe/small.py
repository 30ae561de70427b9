"""A small sound recipe as a mapping, for tests to change."""

from copy import deepcopy
from typing import Any

from truestep.errors import RecipeError
from truestep.recipe.load import load

_SMALL: dict[str, Any] = {
    "run": {"name": "small"},
    "model": {"hidden_size": 64, "num_layers": 2},
    "data": {
        "train": {"source": "python-stdlib", "split": "train", "holdout": 0.01},
        "held": {"source": "python-stdlib", "split": "heldout", "holdout": 0.01},
    },
    "stages": [
        {
            "name": "base",
            "data": "train",
            "context": 128,
            "tokens": "1M",
            "batch_tokens": 8192,
            "evaluate": {"data": "held"},
            "gate": {"max_bits_per_byte": 2.0},
        }
    ],
}


def small(**sections: Any) -> dict[str, Any]:
    """The recipe with whole top-level sections replaced."""
    return deepcopy(_SMALL) | sections


def problems(source: Any, *overrides: str) -> list[str]:
    """The sentences that loading ends with; none where it succeeds."""
    try:
        load(source, overrides)
    except RecipeError as error:
        return error.problems
    return []
