"""What the supervisor has to say, on its way into the run log and onto the terminal. Torch-free.

The log has one writer, rank 0; so events go through the run's outbox. Before the run directory is there (the first
attempt makes it, or refuses the recipe and leaves nothing) they are kept here.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truestep.errors import LogError
from truestep.runlog.log import LogReader, RunLog, next_attempt, segments
from truestep.runlog.outbox import post, take_in
from truestep.runlog.records import AttemptEnd

RUN_FILE = "run.json"
"""The first thing that an attempt writes into a run's directory."""


@dataclass
class Events:
    """Posts in order; nothing is lost, and nothing is written before the run exists."""

    run_dir: Path
    _kept: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether the run directory is there to write to."""
        return (self.run_dir / RUN_FILE).exists()

    def post(self, kind: str, /, **values: Any) -> None:
        """A fault, a decision, or a member's coming and going. `at_s` is to be given: it may be posted later."""
        self._kept.append((kind, values))
        self.flush()

    def flush(self) -> None:
        """Bring out what was kept, as soon as the run is there."""
        while self._kept and self.open:
            kind, values = self._kept.pop(0)
            post(self.run_dir, kind, **values)

    def close(self, sentence: str) -> None:
        """The run is given up and no worker lives: write what waits into the log, as an attempt that only failed."""
        self.flush()
        if not self.open:
            return
        log = RunLog(self.run_dir, next_attempt(self.run_dir))
        try:
            take_in(self.run_dir, log)
            log.append("attempt_end", reason="failed", error=sentence)
        finally:
            log.close()

    def last_end(self) -> AttemptEnd | None:
        """How the newest attempt ended, if it said so."""
        try:
            paths = segments(self.run_dir)
        except LogError:
            return None
        ends = [r.data for r in LogReader(self.run_dir, start=paths[-1]).records()] if paths else []
        return next((data for data in reversed(ends) if isinstance(data, AttemptEnd)), None)
