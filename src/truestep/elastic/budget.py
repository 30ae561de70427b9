"""How many failures hosts, and the run as a whole, may still have; old ones are forgotten by half. Torch-free.

The budget lies in `<run>/elastic/state.json`, so that it outlives the supervisor: where some outer loop starts a run
again and again, each host gets one more chance each time, and not a new budget.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from truestep.errors import UserError
from truestep.files import publish

SAME_STEP = 3
"""Failures in a row at one step after which the code or the data is taken to be the cause, not a machine."""
FORMAT = 1


@dataclass
class Score:
    """Failures, each of which counts half after every half-life. Times are Unix seconds."""

    value: float = 0.0
    at_s: float = 0.0

    def now(self, now_s: float, forget_s: float) -> float:
        """What is left of them."""
        if not self.value or not forget_s:
            return 0.0
        return self.value * 0.5 ** (max(0.0, now_s - self.at_s) / forget_s)

    def add(self, now_s: float, forget_s: float) -> None:
        """One more."""
        self.value, self.at_s = self.now(now_s, forget_s) + 1.0, now_s


@dataclass
class Series:
    """Failures in a row at the same step, and what was said of the first."""

    step: int = -1
    times: int = 0
    text: str = ""


@dataclass
class Budget:
    """`restarts` failures of each host are borne, and of the run as many as its hosts may have together. `quarantined`:
    hosts that were shown to be faulty, with the reason; time does not heal them."""

    restarts: int
    forget_s: float
    hosts: dict[str, Score] = field(default_factory=dict)
    run: Score = field(default_factory=Score)
    quarantined: dict[str, str] = field(default_factory=dict)
    series: Series = field(default_factory=Series)

    def failed(self, host: str | None, now_s: float) -> None:
        """A failure of a worker on `host`; None: nobody knows whose it was, so that the run alone bears it."""
        if host is not None:
            self.hosts.setdefault(host, Score()).add(now_s, self.forget_s)
        self.run.add(now_s, self.forget_s)

    def failed_at(self, step: int, text: str) -> None:
        """Where a failure of the code, not of a whole host, happened: `step` of the run, and what was said of it."""
        if step == self.series.step:
            self.series.times += 1
        else:
            self.series = Series(step, 1, text)

    def score(self, host: str, now_s: float) -> float:
        """Failures of a host that are not forgotten."""
        known = self.hosts.get(host)
        return known.now(now_s, self.forget_s) if known else 0.0

    def spent(self, host: str, now_s: float) -> bool:
        """Whether a host has failed too often."""
        return self.score(host, now_s) > self.restarts

    def run_spent(self, hosts: int, now_s: float) -> bool:
        """Whether the run, of that many hosts, has failed so often that each of them could have been given up."""
        return self.run.now(now_s, self.forget_s) > (self.restarts + 1) * max(1, hosts) - 1

    @property
    def stuck(self) -> bool:
        """Whether the run fails at one step again and again."""
        return self.series.times >= SAME_STEP

    def once_more(self) -> None:
        """Somebody starts the run again by hand: what was given up gets one more chance, quarantines stay."""
        for score in self.hosts.values():
            score.value = min(score.value, float(self.restarts))
        self.run = Score()
        self.series = Series()

    @classmethod
    def load(cls, file: Path, restarts: int, forget_s: float) -> Self:
        """The budget that lies in `file`, or a fresh one."""
        if not file.exists():
            return cls(restarts, forget_s)
        try:
            return cls(restarts, forget_s, **_read(json.loads(file.read_bytes())))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file} is damaged ({error}); delete it: failures of hosts and quarantines are forgotten then"
            ) from None

    def save(self, file: Path) -> None:
        """Keep it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        known = {name: value for name, value in asdict(self).items() if name not in ("restarts", "forget_s")}
        publish(file, json.dumps({"format": FORMAT} | known, indent=1).encode())


def _read(body: dict[str, Any]) -> dict[str, Any]:
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']}")
    return {
        "hosts": {str(name): Score(**score) for name, score in body["hosts"].items()},
        "run": Score(**body["run"]),
        "quarantined": {str(name): str(why) for name, why in body["quarantined"].items()},
        "series": Series(**body["series"]),
    }
