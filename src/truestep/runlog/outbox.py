"""Events that are noticed outside the workers (by a supervisor, a drill) on their way into the run log.

The log has one writer. Others leave each event as a small file in `<run>/outbox`; whoever holds the log takes them in,
in order. A crash in between may take one in twice, under the same `id`; readers count an id once.
"""

import json
import time
import uuid
from dataclasses import fields
from pathlib import Path
from typing import Any

from truestep.files import publish
from truestep.runlog.log import RunLog
from truestep.runlog.records import KINDS

FOLDER = "outbox"


def post(run_dir: Path, kind: str, /, **values: Any) -> None:
    """Leave an event of `kind`, one of those with `at_s` and `id` (fault, decision, member, drill)."""
    now = time.time()
    named = {"at_s": round(now, 3), "id": uuid.uuid4().hex} | values
    KINDS[kind](**named)
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{time.time_ns():020d}-{named['id']}.json"
    publish(folder / name, json.dumps({"kind": kind, "data": named}).encode())


def take_in(run_dir: Path, log: RunLog) -> int:
    """Append every event that waits to the log; returns how many there were."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return 0
    waiting = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    for path in waiting:
        event = json.loads(path.read_bytes())
        known = {each.name for each in fields(KINDS[event["kind"]])}
        log.append(event["kind"], **{name: value for name, value in event["data"].items() if name in known})
        path.unlink()
    return len(waiting)
