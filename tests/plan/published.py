"""Formulas as papers print them, to check ours against and to compare with: nothing of truestep's own model is in them.

Of a GPT of width h with a heads, sequence s and vocabulary V; b rows in a microbatch; t tensor and p pipeline ranks, v
pipeline stages on each."""

from typing import Literal


def gpt_parameters(layers: int, h: int, s: int, V: int) -> float:
    """12 L h² (1 + 13/(12 h) + (V + s)/(12 L h)) for L layers (arXiv 2104.04473, equation 2)."""
    return 12 * layers * h * h * (1 + 13 / (12 * h) + (V + s) / (12 * layers * h))


def training_days(parameters: float, tokens: float, gpus: int, flops_per_s: float) -> float:
    """8 T P / (n X) (arXiv 2104.04473, equation 4): forward, backward and full recomputation."""
    return 8 * tokens * parameters / (gpus * flops_per_s) / 86400


def activation_bytes_per_layer(
    s: int, b: int, h: int, a: int, t: int, *, sequence_parallel: bool, recompute: Literal["none", "selective", "full"]
) -> float:
    """Of 16-bit activations with dropout, on one tensor rank (arXiv 2205.05198, table 2)."""
    if recompute == "full":
        return 2 * s * b * h
    attention = 0.0 if recompute == "selective" else 5 * a * s / h
    if sequence_parallel:
        return s * b * h / t * (34 + attention)
    return s * b * h * (10 + 24 / t + attention / t)


def first_stage_bytes(per_layer: float, layers: int, p: int, v: int = 1) -> float:
    """Of the first pipeline rank: p microbatches of layers / p, times 1 + (p - 1)/(p v) when interleaved (arXiv
    2205.05198, section 4.2.3)."""
    return per_layer * layers * (1 + (p - 1) / (p * v) if v > 1 else 1)


def zero_bytes(
    parameters: float, ranks: int, stage: int, weights: int = 2, gradients: int = 2, states: int = 12
) -> float:
    """Model states of a rank under ZeRO stage 0 to 3 (arXiv 1910.02054, section 3): `weights`, `gradients` and
    optimizer `states` in bytes a parameter; stage 1 shares the states, 2 gradients too, 3 weights too."""
    shares = [ranks if stage >= least else 1 for least in (3, 2, 1)]
    return parameters * sum(size / share for size, share in zip((weights, gradients, states), shares, strict=True))
