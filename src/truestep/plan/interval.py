"""How often to save: the interval between checkpoints that loses least time, from what a save costs and how often the
run fails, both as they are measured (Young 1974; Daly 2006, doi:10.1016/j.future.2004.11.016).

Saving every t seconds stalls training by C/t of the time, and a failure loses t/2 on average. With failures at the
unknown rate L the expected loss is C/t + E[L] t/2, so what counts of the belief about L is its mean, and M = 1/E[L].
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import exp, log, sqrt
from statistics import median

from truestep.runlog.records import IN_ORDER, AttemptEnd, AttemptStart, Record, Save, Segment, Step

PRIOR_DEVICE_S = 54 * 86400 * 16384 / 419
"""Device-seconds between failures before a run has shown its own (5.8 years): 419 unexpected interruptions in 54 days
of Llama 3 405B on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""
DECADES = 7
FIRST_S, GUESS_S = 10.0, 0.1
"""The first save of a run comes this early, or earlier where the run fails so often that a save with a stall of GUESS_S
would have to: it shows what a save costs, and whether the store takes it."""
LEAST_S, MOST_S = 1.0, 3600.0
_RECENT = 7  # saves whose median counts


def young(stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 C M): seconds from one save to the next, to first order in C/M."""
    return sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Seconds from the beginning of one save to that of the next, its stall included (Daly's equation 37 plus C):
    sqrt(2 C M) (1 + sqrt(C/2M)/3 + (C/2M)/9) for C < 2M, else M + C."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s + stall_s
    part = stall_s / (2 * mtbf_s)
    return young(stall_s, mtbf_s) * (1 + sqrt(part) / 3 + part / 9)


@dataclass
class FailureRate:
    """What is believed of the failures of a device, given `failures` in `device_s` device-seconds.

    The prior is a mixture of Gamma distributions of shape 1 (each worth one failure) with the published mean, ten times
    that, and so on to 10^6 times, each ten times less likely than the one before. So a run that fails every minute is
    believed after two or three failures, and one that does not fail soon comes to the published rate.
    """

    failures: int = 0
    device_s: float = 0.0

    def mean(self) -> float:
        """Expected failures of one device in a second."""
        n = self.failures
        scales = [PRIOR_DEVICE_S / 10**k for k in range(DECADES)]
        # the evidence of n failures in T under Gamma(1, b) is b T^n / (b + T)^(n + 1); T^n is common to all
        logs = [log(b) - (n + 1) * log(b + self.device_s) - k * log(10) for k, b in enumerate(scales)]
        weights = [exp(one - max(logs)) for one in logs]
        means = [(n + 1) / (b + self.device_s) for b in scales]
        return sum(w * m for w, m in zip(weights, means)) / sum(weights)


@dataclass
class Interval:
    """The interval of a run on `devices`, learnt while it runs. Belongs to the process that decides about saves."""

    devices: int
    rate: FailureRate = field(default_factory=FailureRate)
    clock: Callable[[], float] = time.monotonic
    stalls_s: list[float] = field(default_factory=list)
    totals_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen_s, self._said_s = self.clock(), 0.0

    @classmethod
    def of(cls, records: Iterable[Record], devices: int, clock: Callable[[], float] = time.monotonic) -> "Interval":
        """What the run's log tells so far: up-time and failures of attempts that trained, and what saves cost. The last
        attempt in it goes on, so that it has no end is no failure. A step number that comes again within an attempt was
        a failure too: the run rolled back in place."""
        found, past = cls(devices, clock=clock), _Past()
        for record in records:
            if past.take(record):
                found.rate.failures += 1
            if isinstance(record.data, Save) and record.data.ok and record.data.total_s is not None:
                found.saved(record.data.stall_s, record.data.total_s)
        found.rate.device_s = past.device_s + past.up()
        return found

    def failed(self) -> None:
        """The run lost what came after its newest checkpoint, and goes on."""
        self.rate.failures += 1

    def saved(self, stall_s: float, total_s: float) -> None:
        """A save stalled training for `stall_s` and was committed `total_s` after it began."""
        self.stalls_s = [*self.stalls_s, stall_s][-_RECENT:]
        self.totals_s = [*self.totals_s, total_s][-_RECENT:]

    @property
    def mtbf_s(self) -> float:
        """Expected seconds to a failure of the run."""
        return 1 / (self.rate.mean() * self.devices)

    @property
    def seconds(self) -> float:
        """From the beginning of one save to that of the next."""
        if not self.stalls_s:
            return max(LEAST_S, min(FIRST_S, daly(GUESS_S, self.mtbf_s)))
        best = daly(median(self.stalls_s), self.mtbf_s)
        return max(min(max(best, LEAST_S), MOST_S), median(self.totals_s))

    def due(self, since_s: float) -> bool:
        """Whether to save now, `since_s` after the last save began."""
        now = self.clock()
        self.rate.device_s += self.devices * (now - self._seen_s)
        self._seen_s = now
        return since_s >= self.seconds

    def news(self) -> str | None:
        """What `explain` says, where the interval is no longer about what it was when this was last asked."""
        if 0.5 * self._said_s < self.seconds < 2 * self._said_s:
            return None
        self._said_s = self.seconds
        return self.explain()

    def explain(self) -> str:
        """The interval and why, in a sentence."""
        seen = f"{self.rate.failures} failures in {self.rate.device_s / 3600:.3g} device-hours seen"
        expected = f"a failure is expected every {_words(self.mtbf_s)} ({seen})"
        if not self.stalls_s:
            return f"the first checkpoint after {_words(self.seconds)}, to see what one costs; {expected}"
        costs = f"one stalls training for {_words(median(self.stalls_s))} and takes {_words(median(self.totals_s))}"
        return f"a checkpoint every {_words(self.seconds)}: {costs}, {expected}"


@dataclass
class _Past:
    """An attempt after the other, on the way through the log."""

    device_s: float = 0.0  # of the attempts before the present one
    attempt: int = 0
    begin_s: float = 0.0
    end_s: float = 0.0
    devices: int = 1
    trained: bool = False
    in_order: bool = False
    reached: tuple[str, int] = ("", 0)

    def take(self, record: Record) -> bool:
        """Whether this record shows that there was a failure."""
        data, failed = record.data, False
        if isinstance(data, Segment) and record.attempt != self.attempt:
            failed = self.failed()
            self.device_s += self.up()
            self.attempt, self.begin_s = record.attempt, record.time_s
            self.trained = self.in_order = False
            self.reached = ("", 0)
        elif isinstance(data, AttemptStart):
            self.devices = sum(data.devices.values()) or data.world
        elif isinstance(data, AttemptEnd):
            self.in_order = data.reason in IN_ORDER
        elif isinstance(data, Step):
            stage, step = self.reached
            failed = data.stage == stage and data.step <= step
            self.reached, self.trained = (data.stage, data.step), True
        self.end_s = record.time_s
        return failed

    def failed(self) -> bool:
        return self.trained and not self.in_order

    def up(self) -> float:
        """Device-seconds of the present attempt, if it trained."""
        return self.devices * (self.end_s - self.begin_s) if self.trained else 0.0


def _words(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"
