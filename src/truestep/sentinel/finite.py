"""Non-finite losses and gradients: the watcher that looks before every optimizer step."""

import math
from enum import StrEnum


class Verdict(StrEnum):
    """What the loop does with a step whose gradients are ready."""

    GO = "go"
    SKIP = "skip"
    HALT = "halt"


def judge(loss: float, grad_norm: float, *, scaled: bool) -> Verdict:
    """GO where both numbers are finite. With fp16 loss scaling an overflow of the gradients alone is expected: SKIP.

    Anything else non-finite is HALT: an update would poison every weight, and the reason lies in data, code or chips.
    Both numbers are global, so every rank comes to the same verdict.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return Verdict.GO
    return Verdict.SKIP if scaled and math.isfinite(loss) else Verdict.HALT
