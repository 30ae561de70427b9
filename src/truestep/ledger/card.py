"""The release card of a stage's model: what went in, what it took, what came out, recomputable from the run log.

`build_card` reads the records that the stage's last `card` record counts (or all there are) and nothing else, so that
the card beside a model and one computed anew from the log are equal byte for byte.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from truestep.errors import LogError
from truestep.files import publish, writing
from truestep.ledger.card_faults import fault_facts
from truestep.ledger.card_text import card_text
from truestep.ledger.checks import check_stage
from truestep.ledger.figure import Figure, missing
from truestep.ledger.history import History, Span, collect, standing_steps
from truestep.ledger.ledger import Account, account, num_devices
from truestep.runlog.log import read
from truestep.runlog.records import Card, Data, Eval, Gate, Model, Record, Sample, StageStart, Yardstick, spell

FORMAT = "truestep-card/1"
T = TypeVar("T")


def build_card(run_dir: Path | str, stage: str, records: int | None = None) -> dict[str, Any]:
    """The card of `stage` as JSON. LogError if the log is altered, or the stage is not in it.

    `records` computes it from that many records instead: what a card at hand says in `log.records`.
    """
    log = list(read(run_dir))
    written = [r.data.records for r in log if isinstance(r.data, Card) and r.data.stage == stage]
    history = collect(log[: records or (written[-1] if written else None)])
    spans = history.of_stage(stage)
    start = next((span.start for span in reversed(spans) if span.start), None)
    if start is None:
        began = ", ".join(history.stages()) or "none"
        raise LogError(f"{run_dir} has no stage {stage!r} in its log; stages that have begun: {began}")
    name = next(
        (a.start.run for a in reversed(history.attempts) if a.start and a.start.run), Path(run_dir).resolve().name
    )
    totals = account(f"stage {stage}", spans)
    return {
        "format": FORMAT,
        "name": f"{name}/{stage}",
        "run": name,
        "stage": {"name": stage, "kind": start.stage_kind, "settings": start.settings},
        "gate": _gate(history.records, stage),
        "model": _model(history.records, start),
        "data": [_corpus(data) for data in _corpora(history.records, start)],
        "training": _training(history, stage, start),
        "evaluation": _evaluation(history.records, stage),
        "compute": {key: figure.to_json() for key, figure in totals.figures.items() if key not in ("money", "wall")},
        "time": _time(totals),
        "faults": fault_facts(history),
        "energy": _energy(spans),
        "money": {"cost": totals.figures["money"].to_json()},
        "lineage": _lineage(history, stage, start),
        "attempts": [_attempt(span, history) for span in spans],
        "samples": _samples(history.records, stage),
        "checks": [{"name": c.name, "outcome": c.outcome, "says": c.says} for c in check_stage(history, stage, totals)],
        "digests": _last_start(spans, "digests", {}),
        "versions": _last_start(spans, "versions", {}),
        "log": {"records": len(history.records), "head": history.records[-1].chain},
    }


def write_card(folder: Path | str, card: dict[str, Any]) -> str:
    """Write card.json (canonical) and card.md into `folder`; return the sha256 of card.json."""
    body = canonical(card)
    for name, text in (("card.json", body), ("card.md", card_text(card).encode("utf-8", "replace"))):
        with writing(Path(folder, name)):
            publish(Path(folder, name), text)
    return hashlib.sha256(body).hexdigest()


def canonical(card: dict[str, Any]) -> bytes:
    """The one byte sequence of a card: sorted keys, UTF-8, floats as Python's repr."""
    text = json.dumps(spell(card), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _of(kind: type[T], records: Iterable[Record], stage: str | None = None) -> list[T]:
    """Data of all records of a kind, of one stage if given."""
    found = [r.data for r in records if isinstance(r.data, kind)]
    return found if stage is None else [data for data in found if vars(data)["stage"] == stage]


def _last_start(spans: list[Span], name: str, default: Any) -> Any:
    return next((vars(s.attempt.start)[name] for s in reversed(spans) if s.attempt.start), default)


def _gate(records: list[Record], stage: str) -> dict[str, Any]:
    gates = _of(Gate, records, stage)
    if not gates:
        return {"verdict": "UNGATED", "reason": "no gate decision is in the run log", "kind": None, "figures": {}}
    gate = gates[-1]
    verdict = "UNGATED" if gate.verdict == "ungated" else gate.verdict
    return {"verdict": verdict, "reason": gate.reason, "kind": gate.gate_kind, "figures": gate.figures}


def _model(records: list[Record], start: StageStart) -> dict[str, Any]:
    models = _of(Model, records, start.stage)
    params = {name: Figure(n, "parameters", "counted from the shapes").to_json() for name, n in start.params.items()}
    if "total" not in params:
        params["total"] = missing("parameters", "the stage did not declare its parameter counts").to_json()
    return {
        "parameters": params,
        "architecture": start.model,
        "precision": start.precision,
        "digest": models[-1].digest if models else None,
        "bytes": _given(models[-1].bytes if models else None, "bytes", "size of the weights"),
    }


def _given(value: float | int | None, unit: str, method: str) -> dict[str, Any]:
    figure = missing(unit, method) if value is None else Figure(value, unit, method)
    return figure.to_json()


def _corpora(records: list[Record], start: StageStart) -> list[Data]:
    """The corpora that the stage names, each as it was last built."""
    latest = {data.name: data for data in _of(Data, records)}
    return [latest[name] for name in start.data if name in latest] if start.data else list(latest.values())


def _corpus(data: Data) -> dict[str, Any]:
    return {
        "name": data.name,
        "source": data.source,
        "licence": data.licence,
        "fingerprint": data.fingerprint,
        "documents": _given(data.documents, "documents", "documents kept by the build"),
        "tokens": _given(data.tokens, "tokens", "tokens kept by the build"),
        "bytes": _given(data.bytes, "bytes", "text kept by the build"),
        "dropped": {why: _given(n, "documents", "dropped by the build") for why, n in data.dropped.items()},
    }


def _training(history: History, stage: str, start: StageStart) -> dict[str, Any]:
    steps = standing_steps(history, stage)
    tail = steps[-max(1, len(steps) // 50) :]
    loss = (
        sum(s.loss * s.targets for s in tail) / sum(s.targets for s in tail) if sum(s.targets for s in tail) else None
    )
    method = f"mean per target over the last {len(tail)} steps"
    return {
        "steps": Figure(len(steps), "steps", "steps that the model stands on").to_json(),
        "steps_planned": start.steps,
        "context": start.context,
        "batch_tokens": start.batch_tokens,
        "tokens": Figure(sum(s.tokens for s in steps), "tokens", "tokens of these steps").to_json(),
        "targets": Figure(sum(s.targets for s in steps), "targets", "tokens with a loss").to_json(),
        "skipped_updates": Figure(sum(s.skipped for s in steps), "steps", "updates not applied").to_json(),
        "final_loss": _given(loss, "nats per token", method),
    }


def _evaluation(records: list[Record], stage: str) -> dict[str, Any]:
    evals = _of(Eval, records, stage)
    last = evals[-1] if evals else None
    about = f"held-out text{f' {last.data}' if last and last.data else ''}" + (f", step {last.step}" if last else "")
    bits = f"loss in bits of all targets / bytes of {about}{f' ({last.method})' if last and last.method else ''}"
    yardsticks = {n: b for y in _of(Yardstick, records) for n, b in y.bits_per_byte.items()}
    return {
        "step": last.step if last else None,
        "loss": _given(last.loss if last else None, "nats per token", f"mean over the targets of {about}"),
        "bits_per_byte": _given(last.bits_per_byte if last else None, "bits per byte", bits),
        "bytes": _given(last.bytes if last else None, "bytes", f"text of {about}"),
        "targets": _given(last.targets if last else None, "targets", f"targets of {about}"),
        "yardsticks": {
            name: Figure(value, "bits per byte", f"{name} on the same held-out text").to_json()
            for name, value in yardsticks.items()
        },
    }


def _time(totals: Account) -> dict[str, Any]:
    phases = {
        name: Figure(s, "s", "from the run log's records of this phase").to_json()
        for name, s in totals.phases_s.items()
    }
    return {"wall": totals.figures["wall"].to_json(), "phases": phases}


def _energy(spans: list[Span]) -> dict[str, Any]:
    none = "no meter was read"
    return {
        "electricity": missing("kWh", none).to_json(),
        "carbon": missing("kg CO2e", "needs electricity and a grid factor").to_json(),
        "water": missing("litres", none).to_json(),
        "pue": _declared(spans, "pue", "PUE"),
        "grid_region": _declared(spans, "grid_region", ""),
    }


def _declared(spans: list[Span], name: str, unit: str) -> dict[str, Any]:
    values = {vars(span.attempt.start)[name] for span in spans if span.attempt.start}
    if len(values) != 1 or None in values:
        said = "declared by some attempts only, or not alike" if values - {None} else "not declared in [ledger]"
        return missing(unit, said).to_json()
    return Figure(values.pop(), unit, "declared in [ledger]", "recipe, in the run log").to_json()


def _lineage(history: History, stage: str, start: StageStart) -> dict[str, Any]:
    """Where the model came from, and the compute of all of it, known only if every ancestor is in this log."""
    ancestors, at = [], start
    while at.start and at.start.startswith("stage:"):
        name = at.start.removeprefix("stage:")
        at = next((s.start for s in reversed(history.of_stage(name)) if s.start), None)
        if at is None or name in (stage, *ancestors):
            break
        ancestors.append(name)
    method = f"model FLOPs, causal, of stages {', '.join([stage, *ancestors])}"
    flops = [account(name, history.of_stage(name)).value("flops_causal") for name in [stage, *ancestors]]
    whole = at is not None and at.start == "init" and None not in flops
    total = sum(f for f in flops if f is not None)
    lacking = missing("FLOP", f"{method}; an ancestor's compute is not in this log")
    figure = Figure(total, "FLOP", method) if whole else lacking
    return {"start": start.start, "parent": start.parent, "ancestors": ancestors, "flops_causal": figure.to_json()}


def _attempt(span: Span, history: History) -> dict[str, Any]:
    attempt = span.attempt
    silent = "made this card" if attempt is history.attempts[-1] else "killed"
    end = attempt.end.reason if attempt.end else silent
    figures = account("", [span]).figures
    return {
        "attempt": attempt.number,
        "end": end,
        "devices": attempt.start.devices if attempt.start else {},
        "num_devices": _given(num_devices(attempt), "devices", "held by the attempt"),
        "figures": {name: figures[name].to_json() for name in ("steps", "tokens", "wall", "device_hours", "goodput")},
    }


def _samples(records: list[Record], stage: str) -> list[dict[str, str]]:
    latest = {sample.prompt: sample.text for sample in _of(Sample, records, stage)}
    return [{"prompt": prompt, "text": text} for prompt, text in latest.items()]
