"""Spikes of the loss and of the gradient norm: the watcher that looks before every optimizer step.

A number is a spike if it lies above

    median + threshold * 1.4826 * max(MAD, FLOOR * |median|)

of the steps that were taken lately, MAD being the median of their distances from the median, which times 1.4826 is the
standard deviation of normal noise (Hampel 1974). The floor keeps a flat window from calling noise a spike.

The update of such a step, and of one whose numbers are not finite, is left out. Too many in a row mean that weights or
optimizer went astray before (PaLM, arXiv 2204.02311, section 5.1): the run goes back to a checkpoint of before the
first of them and leaves out the data since.

Loss and norm are those that all ranks have agreed on anyway, so that all decide alike, and nothing waits for a device.
The state is part of the checkpoint: a run that resumes, and one that is replayed, decides as the first one did.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from truestep.recipe.sentinel import Spikes
from truestep.runlog.records import Fault
from truestep.sentinel.alarm import Action, Alarm
from truestep.sentinel.finite import Judgement, Verdict, judge_finite

_SIGMA = 1.4826
FLOOR = 0.01
FEWEST = 8


def middle_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and 1.4826 MAD."""
    middle = median(values)
    return middle, _SIGMA * median(abs(x - middle) for x in values)


class SpikeWatch:
    """Judges each step and counts. `skips`: updates left out, `in_a_row` of them since the last one that was taken,
    the first of those at step `first_skipped` (counted from 0); `rollbacks` so far, the last to `rolled_back_to`."""

    def __init__(self, section: Spikes | None = None):
        self.section = section or Spikes()
        self.losses: deque[float] = deque(maxlen=self.section.window)
        self.norms: deque[float] = deque(maxlen=self.section.window)
        self.skips = self.in_a_row = self.first_skipped = self.rollbacks = 0
        self.rolled_back_to = -1

    def judge(self, loss: float, grad_norm: float, *, scaled: bool) -> Judgement:
        """What to do with a step of these global numbers. `scaled`: fp16 loss scaling may be to blame for overflow."""
        finite = judge_finite(loss, grad_norm, scaled=scaled)
        skips = self.section.action == "skip"
        if finite.verdict is Verdict.HALT and skips:
            return replace(finite, verdict=Verdict.SKIP)
        if finite.verdict is not Verdict.GO:
            return finite
        reason = self._above("loss", loss, self.losses) or self._above("gradient norm", grad_norm, self.norms)
        return Judgement(Verdict.SKIP if skips else Verdict.GO, reason, "spike") if reason else finite

    def note(self, step: int, loss: float, grad_norm: float, judgement: Judgement) -> None:
        """What became of `step` (counted from 0)."""
        if judgement.verdict is Verdict.GO:
            self.losses.append(loss)
            self.norms.append(grad_norm)
            self.in_a_row = 0
        elif judgement.fault:
            self.first_skipped = step if self.in_a_row == 0 else self.first_skipped
            self.in_a_row += 1
            self.skips += 1

    def alarms(self, step: int, judgement: Judgement) -> list[Alarm]:
        """The fault of a step (counted from 0) that `note` was told of, if there is one, and what is to follow."""
        kind = judgement.fault
        if kind is None:
            return []
        section, skipped = self.section, f"{self.in_a_row} updates in a row were left out"

        def alarm(action: Action, text: str = "", since: int | None = None) -> list[Alarm]:
            words = "; ".join(filter(None, (judgement.reason, text)))
            fault = Fault(kind=kind, text=words, step=step + 1, since=since)
            return [Alarm(fault, action, (self.first_skipped, step + 1) if action == "roll back" else None)]

        if judgement.verdict is Verdict.HALT:
            return alarm("halt", f"so the step was not taken; {_REMEDY}")
        if judgement.verdict is Verdict.GO:
            return alarm("tell")
        if self.skips > section.skips:
            return alarm("halt", f"more updates were left out than sentinel.spikes.skips = {section.skips}; {_REMEDY}")
        if self.in_a_row < section.in_a_row:
            return alarm("tell")
        if self.rollbacks >= section.rollbacks:
            return alarm("halt", f"{skipped}, and the run has rolled back {self.rollbacks} times; {_REMEDY}")
        # A checkpoint after which no step was taken is itself what is wrong.
        stale = self.first_skipped == self.rolled_back_to
        return alarm("roll back", skipped, self.first_skipped + (not stale))

    def rolled_back(self, to_step: int, skips: int, rollbacks: int) -> None:
        """After the state of a checkpoint was restored: what was counted until then stays counted."""
        self.skips, self.rollbacks = skips, rollbacks + 1
        self.in_a_row, self.rolled_back_to = 0, to_step

    def state(self) -> dict[str, Any]:
        """For the checkpoint; plain numbers."""
        counts = (self.skips, self.in_a_row, self.first_skipped, self.rollbacks, self.rolled_back_to)
        return {"losses": list(self.losses), "norms": list(self.norms), "counts": list(counts)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self.section.window)
        self.norms = deque(state["norms"], maxlen=self.section.window)
        self.skips, self.in_a_row, self.first_skipped, self.rollbacks, self.rolled_back_to = state["counts"]

    def _above(self, what: str, value: float, window: Sequence[float]) -> str:
        """How far a value lies above the window, in words, if it is a spike."""
        if len(window) < max(FEWEST, self.section.window // 2):
            return ""
        middle, spread = middle_and_spread(window)
        spread = max(spread, _SIGMA * FLOOR * abs(middle))
        if value <= middle + self.section.threshold * spread:
            return ""
        far = f"{(value - middle) / spread:.0f} deviations " if spread else ""
        return f"{what} {value:.4g} lies {far}above the median {middle:.4g} of the last {len(window)} updates"


_REMEDY = (
    "look at the data of these steps, or start a run with a lower learning rate (checkpoints up to here are sound)"
)
