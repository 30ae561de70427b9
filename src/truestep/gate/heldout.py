"""The first gate: held-out loss within a bound or not worse than the parent's. It fails closed.

A figure that is missing or not a number never passes. Paired statistics over suites come with the gate's own suites.
"""

import math
from dataclasses import dataclass

from truestep.recipe.stage import Gate


@dataclass(frozen=True)
class Verdict:
    """`outcome` is pass, fail or ungated; `reasons` holds a sentence for each condition that was looked at."""

    outcome: str
    reasons: list[str]

    @property
    def promotes(self) -> bool:
        return self.outcome in ("pass", "ungated")


def decide(gate: Gate, figures: dict[str, float | None], parent: dict[str, float | None] | None) -> Verdict:
    """Judge a model's held-out `figures` ("loss" in nats a token, "bits_per_byte") against bounds and its parent.

    A gate with no bound needs a parent; without one the model fails, since nothing was shown.
    """
    if gate.kind == "none":
        return Verdict("ungated", [gate.reason or "no reason was given"])
    bounds = [
        ("loss", gate.max_loss, "the stated bound"),
        ("bits_per_byte", gate.max_bits_per_byte, "the stated bound"),
    ]
    if parent is not None:
        parent_loss = parent.get("loss")
        if _missing(parent_loss):
            return Verdict("fail", ["the parent's held-out loss is missing, so nothing can be compared"])
        assert parent_loss is not None
        bounds.append(
            ("loss", parent_loss + gate.margin, f"the parent's {parent_loss:.6g} plus the margin {gate.margin:g}")
        )
    checks = [_check(name, figures.get(name), bound, source) for name, bound, source in bounds if bound is not None]
    if not checks:
        return Verdict("fail", ["the gate states no bound and the model has no parent to compare with"])
    return Verdict("pass" if all(good for good, _ in checks) else "fail", [sentence for _, sentence in checks])


def _missing(value: float | None) -> bool:
    return value is None or not math.isfinite(value)


def _check(name: str, value: float | None, bound: float, source: str) -> tuple[bool, str]:
    words = name.replace("_", " ")
    if _missing(value):
        return False, f"held-out {words} is {'missing' if value is None else value}"
    assert value is not None
    good = value <= bound
    return good, f"held-out {words} {value:.6g} {'is within' if good else 'exceeds'} {bound:.6g} ({source})"
