"""Learning-rate factors as pure functions of the count of optimizer steps taken: no state, so nothing to resume
wrongly.

A skipped step is not taken and does not move the schedule. With W steps of warm-up, of T in all, step k (k taken before
it) has the factor (k + 1) / W while k < W, so that the first step already moves and the W-th has the full rate.
Afterwards the phase runs from factor 1 at k = W to `final` at k = T (the step that would come next).
"""

import math

from truestep.errors import UserError
from truestep.recipe.stage import Schedule


def factor(schedule: Schedule, taken: int, total: int) -> float:
    """Multiplier of the peak rate for the next step, when `taken` of `total` steps are done. Raises UserError where
    warm-up and decay do not fit into the stage."""
    warmup, decay = _phases(schedule, total)
    if taken < warmup:
        return (taken + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    length = decay if schedule.kind == "wsd" else total - warmup
    progress = min(max((taken - (total - length)) / length, 0.0), 1.0) if length else 0.0
    shape = schedule.decay_shape if schedule.kind == "wsd" else schedule.kind
    return schedule.final + (1.0 - schedule.final) * _SHAPES[shape](progress)


_SHAPES = {
    "linear": lambda t: 1.0 - t,
    "1-sqrt": lambda t: 1.0 - math.sqrt(t),  # arXiv 2405.18392, equation 3
    "cosine": lambda t: 0.5 * (1.0 + math.cos(math.pi * t)),
}


def _phases(schedule: Schedule, total: int) -> tuple[int, int]:
    """Steps of warm-up and of decay (0 but for wsd)."""
    warmup = _steps(schedule.warmup, total)
    decay = _steps(schedule.decay, total) if schedule.kind == "wsd" else 0
    if warmup + decay > total:
        raise UserError(
            f"schedule.warmup = {schedule.warmup:g} and schedule.decay = {schedule.decay:g} make {warmup + decay} "
            f"steps, more than the stage's {total}; shorten them, or write fractions of the stage."
        )
    return warmup, decay


def _steps(value: float, total: int) -> int:
    return round(value * total) if value < 1 else round(value)
