"""Preferences gone astray: a growing margin hides that chosen answers become less likely as well."""

from collections import deque
from collections.abc import Callable, Sequence

from truestep.sentinel.alarm import Alarm
from truestep.train.step import StepResult

WINDOW = 8
"""Steps that are averaged, and compared with as many before them."""
COMPARED = ("both_fell", "good")
"""Metrics of losses whose rewards are measured against a reference; below 0 means less likely than there."""


class BothFall:
    """A check of the loop (train.loop.Check): tells once when the rewards of chosen and of rejected answers both are
    below 0 and still fall, over the last steps on average."""

    def __init__(self, tell: Callable[[str], None]):
        self._tell = tell
        self._rewards: deque[tuple[float, float]] = deque(maxlen=2 * WINDOW)
        self._told = False

    def after(self, result: StepResult) -> Sequence[Alarm]:
        metrics = result.metrics
        if self._told or not any(name in metrics for name in COMPARED):
            return []
        self._rewards.append((metrics["reward_chosen"], metrics["reward_rejected"]))
        if len(self._rewards) == 2 * WINDOW:
            before, now = (_means(list(self._rewards)[first : first + WINDOW]) for first in (0, WINDOW))
            if all(late < min(early, 0.0) for early, late in zip(before, now)):
                self._told = True
                self._tell(
                    f"rewards of chosen and of rejected answers both fall ({now[0]:.3g} and {now[1]:.3g} over the last "
                    f"{WINDOW} steps): chosen answers become less likely too; try preference.sft, a larger "
                    f"preference.beta, or a lower optim.lr"
                )
        return []


def _means(rewards: list[tuple[float, float]]) -> tuple[float, float]:
    chosen, rejected = (sum(side) / len(rewards) for side in zip(*rewards))
    return chosen, rejected
