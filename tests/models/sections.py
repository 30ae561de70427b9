"""Small resolved sections for tests."""

from typing import Any

from truestep.recipe.model import ModelSection

VOCAB = 37


def small(**changes: Any) -> ModelSection:
    """Three layers of width 32; `changes` are fields of the section."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
    return ModelSection(**(sizes | changes)).resolved(VOCAB)
