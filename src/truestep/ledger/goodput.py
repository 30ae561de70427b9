"""How much of a run's time was progress, and what failures took.

  goodput  productive time / all time
  ETTR     R / (R + U + Q), the effective training time ratio after arXiv 2410.21680. U is what failures and checkpoints
           take (start-up, restart, detection, rework, checkpoint stalls), Q the queue, which this log sees as a part of
           restart, and R is all other time of the run, so evaluation and waits for data are no loss. The equation is
           from memory, and what belongs to each letter is chosen here, not read in the paper. It counts the losses of
           the estimate that others quote from it, (1 - N r (u + t/2)) / (1 + w/t): restarts u, rework t/2, writes w.
Time in which nobody wanted the run to go on (after a polite stop) is in neither.

  ideal    goodput of the same work with the same failures, detection and restarts, had every save been made at the best
           interval: for n failures in U seconds of training, C U/t + n (t/2 + T) with t = max(sqrt(2 C U/n), T), where
           a save stalls for C and is committed after T (Young 1974).
"""

from dataclasses import dataclass
from math import sqrt

from truestep.ledger.figure import Figure, missing
from truestep.ledger.history import History
from truestep.ledger.ledger import DATA_WAIT, EVALUATION, PRODUCTIVE, RESTART, REWORK, STALL, STARTUP
from truestep.ledger.timeline import DETECTION, IDLE, Line, Timeline, timeline
from truestep.runlog.records import Save

LOST = (STARTUP, RESTART, DETECTION, REWORK, STALL)


@dataclass(frozen=True)
class Goodput:
    """Seconds by kind (timeline.KINDS and named phases), which add up to `wall_s`; figures from them."""

    lines: list[Line]
    seconds: dict[str, float]
    wall_s: float
    failures: int
    goodput: Figure
    ettr: Figure
    ideal: Figure

    def of(self, line: Line) -> float | None:
        """Goodput of one attempt, the time before it included; None if no time has passed."""
        wanted = sum(line.micros.values()) - line.micros.get(IDLE, 0)
        return line.micros.get(PRODUCTIVE, 0) / wanted if wanted else None


def goodput(history: History) -> Goodput:
    """The figures of a whole run."""
    found = timeline(history)
    micros = found.micros()
    wanted = sum(micros.values()) - micros[IDLE]
    lost = sum(micros[kind] for kind in LOST)
    return Goodput(
        lines=found.lines,
        seconds={kind: us / 1e6 for kind, us in micros.items()},
        wall_s=sum(micros.values()) / 1e6,
        failures=found.failures,
        goodput=_share(micros[PRODUCTIVE], wanted, "productive time / all time in which the run was wanted"),
        ettr=_share(
            wanted - lost, wanted, "R/(R+U+Q) after arXiv 2410.21680; U: start-up, restart, detection, rework, stalls"
        ),
        ideal=_ideal(found, [r.data for r in history.records if isinstance(r.data, Save) and r.data.ok]),
    )


def _share(part: int, whole: int, method: str) -> Figure:
    return Figure(part / whole, "1", method) if whole else missing("1", f"{method}; no time has passed")


def _ideal(found: Timeline, saves: list[Save]) -> Figure:
    method = "the same work and failures with saves at the best interval (Young 1974)"
    micros = found.micros()
    trained_s = (micros[PRODUCTIVE] + micros[DATA_WAIT] + micros[EVALUATION]) / 1e6
    costs_s = [(save.stall_s, save.total_s) for save in saves if save.total_s is not None]
    if not costs_s or not trained_s:
        return missing("1", f"{method}; no save whose time is known, or no step yet")
    stall_s, total_s = (sum(each) / len(costs_s) for each in zip(*costs_s))
    rest_s = sum(us for kind, us in micros.items() if kind not in (IDLE, STALL, REWORK)) / 1e6
    best_s, lost_s = ideal_interval(found.failures, trained_s, stall_s, total_s)
    about = "no failure" if best_s is None else f"{found.failures} failures, a save each {best_s:.3g} s"
    return Figure(micros[PRODUCTIVE] / 1e6 / (rest_s + lost_s), "1", f"{method}; {about}")


def ideal_interval(failures: int, trained_s: float, stall_s: float, total_s: float) -> tuple[float | None, float]:
    """Best interval, and seconds lost with it to stalls and to steps done again. Without a failure none is best."""
    if not failures:
        return None, 0.0
    best_s = max(sqrt(2 * stall_s * trained_s / failures), total_s)
    if best_s == 0:
        return 0.0, 0.0
    return best_s, stall_s * trained_s / best_s + failures * (best_s / 2 + total_s)
