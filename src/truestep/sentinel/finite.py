"""Verdicts on a step whose gradients are ready, and the first question: are its numbers finite?"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Verdict(StrEnum):
    """What the loop does with a step whose gradients are ready."""

    GO = "go"
    SKIP = "skip"
    HALT = "halt"


@dataclass(frozen=True)
class Judgement:
    """`reason` says in words what is unusual about a step; `fault` is its kind, None where nothing is wrong
    (fp16 overflows are usual, and a batch may have no targets)."""

    verdict: Verdict
    reason: str = ""
    fault: Literal["spike", "not finite"] | None = None


FINE = Judgement(Verdict.GO)
NO_TARGETS = Judgement(Verdict.SKIP, "its batch has no targets")


def judge_finite(loss: float, grad_norm: float, *, scaled: bool) -> Judgement:
    """FINE where both numbers are finite. With fp16 loss scaling an overflow of the gradients alone is expected: SKIP.

    Anything else non-finite is HALT: an update would poison every weight, and the reason lies in data, code or chips.
    Both numbers are global, so every rank comes to the same verdict.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return FINE
    if scaled and math.isfinite(loss):
        return Judgement(Verdict.SKIP, "its gradients overflowed at the present loss scale")
    return Judgement(Verdict.HALT, f"loss {loss} and gradient norm {grad_norm} are not finite", "not finite")
