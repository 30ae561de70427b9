"""Shapes of published models."""

from truestep.recipe.model import ModelSection

LLAMA_405B = ModelSection(
    hidden_size=16384,
    intermediate_size=53248,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    max_context=131072,
    rope_theta=500000.0,
).resolved(128256)
