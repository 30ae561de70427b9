"""What the supervisor has to say, on its way into the run log and onto the terminal. Torch-free.

The log has one writer, rank 0; so events go through the run's outbox. Before the run directory is there (the first
attempt makes it, or refuses the recipe and leaves nothing) they are kept here.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truestep.elastic.attempt import Fault
from truestep.errors import LogError
from truestep.runlog.log import LogReader, RunLog, next_attempt, segments
from truestep.runlog.outbox import post, take_in
from truestep.runlog.records import AttemptEnd

RUN_FILE = "run.json"
"""The first thing that an attempt writes into a run's directory."""
ASK = "elastic/ask.json"


@dataclass
class Events:
    """Posts in order; nothing is lost, and nothing is written before the run exists."""

    run_dir: Path
    _kept: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether the run directory is there to write to."""
        return (self.run_dir / RUN_FILE).exists()

    def fault(self, fault: Fault) -> None:
        """Something went wrong. `at_s` of the fault is on the monotonic clock."""
        at_s = time.time() - (time.monotonic() - fault.at_s)
        named = fault.host is not None
        values = {"text": fault.text, "rank": fault.rank, "host": fault.host, "named": named}
        values["evidence"] = fault.evidence
        self._post("fault", at_s, kind=fault.kind, **values)

    def decision(self, action: str, reason: str, **values: Any) -> None:
        """What is done about it."""
        self._post("decision", time.time(), action=action, reason=reason, **values)

    def member(self, host: str, event: str, processes: int | None = None) -> None:
        """A host came or went."""
        self._post("member", time.time(), host=host, event=event, processes=processes)

    def say(self, text: str) -> None:
        """To whoever sits at the terminal."""
        print(f"supervisor: {text}", flush=True)

    def _post(self, kind: str, at_s: float, /, **values: Any) -> None:
        self._kept.append((kind, values | {"at_s": round(at_s, 3)}))
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
            return None  # no attempt has come so far
        ends = [r.data for r in LogReader(self.run_dir, start=paths[-1]).records()] if paths else []
        return next((data for data in reversed(ends) if isinstance(data, AttemptEnd)), None)

    def asked(self) -> tuple[str, dict[str, str]]:
        """What the workers said when they ended an attempt on purpose: why, and the hosts to do without. Once."""
        file = self.run_dir / ASK
        if not file.exists():
            return "the workers ask to be started again", {}
        ask = json.loads(file.read_bytes())
        file.unlink()
        return str(ask["reason"]), {str(host): str(ask["reason"]) for host in ask["without"]}
