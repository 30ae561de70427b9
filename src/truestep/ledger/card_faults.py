"""What a card says of failures: of the whole run up to it, since a failure in one stage is the run's."""

from typing import Any

from truestep.ledger.figure import Figure, missing
from truestep.ledger.goodput import goodput
from truestep.ledger.history import History
from truestep.ledger.incidents import Incidents, incidents


def fault_facts(history: History) -> dict[str, Any]:
    """Goodput and ETTR of the run, how often it failed, what was found wrong, and how well restores were tried out."""
    whole, found = goodput(history), incidents(history.records)
    kinds: dict[str, int] = {}
    for one in found.faults:
        kinds[one.event.kind] = kinds.get(one.event.kind, 0) + 1
    return {
        "goodput": whole.goodput.to_json(),
        "ettr": whole.ettr.to_json(),
        "ideal_goodput": whole.ideal.to_json(),
        "failures": Figure(
            whole.failures, "failures", "times that work since the newest checkpoint was lost"
        ).to_json(),
        "found": {kind: Figure(n, "faults", "fault records of this kind").to_json() for kind, n in kinds.items()},
        "skipped": Figure(found.skipped, "steps", "updates not applied, in all attempts and stages").to_json(),
        "quarantined": found.quarantined,
        "drills": _drills(found),
    }


def _drills(found: Incidents) -> dict[str, Any]:
    method = "newest checkpoint that a drill restored and found equal"
    if found.drilled is None:
        newest = missing("step", f"{method}; none yet")
    else:
        drill = found.drilled.event
        newest = Figure(drill.step, "step", f"{method} (stage {drill.stage}, {drill.level})")
    return {"state": found.drills, "newest": newest.to_json()}
