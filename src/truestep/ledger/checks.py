"""Identities that a true ledger obeys. A check that lacks a number is "not checked", never passed."""

import math
from dataclasses import dataclass
from typing import Literal

from truestep.ledger.history import History, standing_steps
from truestep.ledger.ledger import OTHER, Account

Outcome = Literal["holds", "broken", "not checked"]
CLOCK_SLACK = 0.01  # share of the wall time by which phases may exceed it: clocks and rounding


@dataclass(frozen=True)
class Check:
    """One identity: its name, whether it holds, and the numbers."""

    name: str
    outcome: Outcome
    says: str


def check_stage(history: History, stage: str, account: Account) -> list[Check]:
    """The identities of a stage's account."""
    return [_steps(history, stage), _tokens(history, stage, account), _phases(account), _mfu(account)]


def _verdict(good: bool) -> Outcome:
    return "holds" if good else "broken"


def _steps(history: History, stage: str) -> Check:
    """The steps that stand are 1, 2, 3, ... without a gap."""
    steps = [step.step for step in standing_steps(history, stage)]
    gap = next((want for want, got in enumerate(steps, 1) if want != got), None)
    says = f"steps 1 to {len(steps)}, each once" if gap is None else f"step {gap} is missing"
    return Check("steps without a gap", _verdict(gap is None), says)


def _tokens(history: History, stage: str, account: Account) -> Check:
    """All tokens = tokens kept + tokens repeated, and those of a finished stage are the planned ones."""
    spans = history.of_stage(stage)
    everything = sum(step.tokens for span in spans for step in span.steps)
    kept, repeated = account.value("tokens"), account.value("tokens_repeated")
    planned = next((s.start for s in reversed(spans) if s.start), None)
    stands = standing_steps(history, stage)
    good = kept is not None and repeated is not None and kept + repeated == everything
    says = f"{kept:,} kept + {repeated:,} repeated = {everything:,}"
    if planned and planned.tokens is not None and stands and stands[-1].step == planned.steps:
        good = good and sum(step.tokens for step in stands) == planned.tokens
        says += f"; {planned.tokens:,} were planned"
    return Check("tokens add up", _verdict(good), says)


def _phases(account: Account) -> Check:
    """No second is counted twice: what phases leave of the wall time is not negative."""
    wall_s, other_s = account.value("wall") or 0.0, account.phases_s[OTHER]
    good = other_s >= -CLOCK_SLACK * wall_s - 0.1 and math.isclose(sum(account.phases_s.values()), wall_s, abs_tol=1e-6)
    return Check("phases add up to the wall time", _verdict(good), f"{other_s:.1f} s of {wall_s:.1f} s in no phase")


def _mfu(account: Account) -> Check:
    """MFU x device-seconds x peak gives the FLOPs again, and is above 0 and at most 1."""
    name = "FLOPs = MFU x device-seconds x peak"
    flops, mfu, capacity = (account.value(name) for name in ("flops_causal", "mfu_causal", "step_peak"))
    if flops is None or mfu is None or capacity is None:
        return Check(name, "not checked", "FLOPs, peak or devices are not recorded")
    good = math.isclose(mfu * capacity, flops, rel_tol=1e-9) and 0 < mfu <= 1
    return Check(name, _verdict(good), f"{mfu:.4f} x {capacity:.4g} = {flops:.4g}; MFU lies in (0, 1]")
