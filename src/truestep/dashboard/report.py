"""The report: one self-contained HTML page about a run, from its log and its ranks' metrics. Whatever is missing is
left out or said to be not recorded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from truestep.dashboard.bands import bands
from truestep.dashboard.faults import event_rows, section_tables
from truestep.dashboard.overlap import overlap_views
from truestep.dashboard.page import page, put
from truestep.dashboard.plots import Curves, Plot, plots, resumed_at
from truestep.dashboard.status import Status, status
from truestep.errors import LogError
from truestep.ledger.checks import Check, check_stage
from truestep.ledger.figure import NOT_RECORDED
from truestep.ledger.goodput import Goodput, goodput
from truestep.ledger.history import History, collect, standing_steps
from truestep.ledger.incidents import incidents
from truestep.ledger.ledger import Account, Ledger, build_ledger
from truestep.ledger.words import bare, count, duration, flat, power_of_ten, show
from truestep.runlog.log import read, verify
from truestep.runlog.metrics import read_metrics
from truestep.runlog.records import Data, Eval, Gate, Memory, Model, Note, Profile, Sample, Yardstick

COLUMNS = {
    "steps": "steps",
    "tokens": "tokens",
    "tokens_repeated": "repeated",
    "wall": "wall time",
    "goodput": "goodput in attempts",
    "device_hours": "device-hours",
    "flops_causal": "FLOPs (causal)",
    "mfu_causal": "MFU (causal)",
    "mfu_full": "MFU (full)",
    "money": "cost",
}


@dataclass(frozen=True)
class StageView:
    """What the page shows of one stage."""

    name: str
    kind: str
    facts: list[tuple[str, str]]
    settings: dict[str, str]
    plots: list[Plot]
    gate: Gate | None
    samples: list[Sample]
    checks: list[Check]
    resumed: bool


def write_report(run_dir: Path | str, out: Path | str) -> Path:
    """Write the page to `out` and return its path; nothing half-written.

    LogError: no run directory, an empty or an altered log. StorageError: `out` cannot be written.
    """
    return put(Path(out), render(run_dir))


def render(run_dir: Path | str) -> str:
    """The page as text."""
    now, history = status(run_dir), collect(read(run_dir))
    ledger, verified = build_ledger(history), verify(run_dir)
    whole, found = goodput(history), incidents(history.records)
    remarks = list(verified.remarks)
    rows = _shard_rows(run_dir, remarks)
    views = [_stage(history, ledger, name, rows) for name in history.stages()]
    return page(
        "report.html.j2",
        now=now,
        tiles=_tiles(now, ledger, whole),
        stages=views,
        time=bands(whole, found.events),
        events=event_rows(found.events, history.attempts[0].begin_s),
        safety=_safety(now),
        sections=section_tables(found),
        overlaps=overlap_views(r.data for r in history.records if isinstance(r.data, Profile)),
        columns=list(COLUMNS.values()),
        rows=_rows(ledger),
        corpora=list({r.data.name: _corpus(r.data) for r in history.records if isinstance(r.data, Data)}.values()),
        notes=list(dict.fromkeys(r.data.text for r in history.records if isinstance(r.data, Note))),
        remarks=remarks,
        facts=_facts(history),
        verified=verified,
    )


def _shard_rows(run_dir: Path | str, remarks: list[str]) -> pa.Table | None:
    try:
        return read_metrics(run_dir)
    except LogError as error:  # one rank's damaged file must not hide the rest of the run
        remarks.append(f"gradient norms per shard are left out: {error}")
        return None


def _stage(history: History, ledger: Ledger, name: str, rows: pa.Table | None) -> StageView:
    spans = history.of_stage(name)
    start = next((s.start for s in reversed(spans) if s.start), None)
    mine = [r.data for r in history.records if not isinstance(r.data, dict)]
    yardsticks = {n: b for y in mine if isinstance(y, Yardstick) for n, b in y.bits_per_byte.items()}
    curves = Curves(
        steps=standing_steps(history, name),
        evals=[e for s in spans for e in s.evals],
        saves=[save for s in spans for save in s.saves],
        resumes=resumed_at([s.steps[0].step for s in spans if s.steps]),
        yardsticks=yardsticks,
        rows=None if rows is None else rows.filter(pc.field("stage") == name),
    )
    gates = [d for d in mine if isinstance(d, Gate) and d.stage == name]
    samples = {d.prompt: d for d in mine if isinstance(d, Sample) and d.stage == name}
    models = [d for d in mine if isinstance(d, Model) and d.stage == name]
    memory = [d for d in mine if isinstance(d, Memory) and d.stage == name]
    return StageView(
        name=name,
        kind=start.stage_kind if start else "",
        facts=_stage_facts(curves, start, models, memory),
        settings=flat({"model": start.model, **start.settings}) if start else {},
        plots=plots(curves),
        gate=gates[-1] if gates else None,
        samples=list(samples.values()),
        checks=check_stage(history, name, ledger.stages[name]),
        resumed=bool(curves.resumes),
    )


def _stage_facts(curves: Curves, start: Any, models: list[Model], memory: list[Memory]) -> list[tuple[str, str]]:
    facts = []
    if start is not None:
        total = start.params.get("total")
        facts.append(("parameters", NOT_RECORDED if total is None else count(total)))
        facts.append(("context", NOT_RECORDED if start.context is None else count(start.context)))
        facts.append(("batch", NOT_RECORDED if start.batch_tokens is None else f"{count(start.batch_tokens)} tokens"))
        facts.append(("precision", start.precision or NOT_RECORDED))
        facts.append(("started from", start.start or NOT_RECORDED))
    if curves.evals:
        facts += _held_out(curves.evals[-1])
    if memory:
        facts += _memory(memory[-1])
    if models:
        facts.append(("model", models[-1].digest[:16]))
    return facts


def _held_out(last: Eval) -> list[tuple[str, str]]:
    bits = "" if last.bits_per_byte is None else f", {last.bits_per_byte:.4f} bits per byte"
    facts = [("held-out", f"loss {last.loss:.4f}{bits}")]
    if last.high_loss is not None:
        facts.append(("low precision costs", f"{last.loss - last.high_loss:+.4f} nats per token"))
    return facts


def _memory(used: Memory) -> list[tuple[str, str]]:
    facts = [("kept for backward", f"{used.kept_bytes / 2**20:,.1f} MiB a microbatch")]
    if used.peak_bytes is not None:
        facts.append(("device's peak", f"{used.peak_bytes / 2**30:,.2f} GiB"))
    return facts


def _tiles(now: Status, ledger: Ledger, whole: Goodput) -> list[tuple[str, str, str]]:
    """(title, figure, what it is) at the top of the page."""
    figures = ledger.total.figures
    last = now.held_out
    held_out = (
        NOT_RECORDED
        if last is None
        else f"{last.loss:.4f}"
        if last.bits_per_byte is None
        else f"{last.bits_per_byte:.4f}"
    )
    unit = "nats per token" if last is not None and last.bits_per_byte is None else "bits per byte"
    return [
        ("held-out", held_out, unit if last is not None else ""),
        ("training loss", NOT_RECORDED if now.loss is None else f"{now.loss:.4f}", "last step"),
        ("tokens", count(figures["tokens"].number() or 0), f"in {show(figures['steps'])}"),
        ("speed", NOT_RECORDED if now.tokens_per_s is None else count(now.tokens_per_s), "tokens/s, last steps"),
        ("MFU", show(figures["mfu_causal"]), "in steps, causal"),
        ("goodput", show(whole.goodput), f"ETTR {show(whole.ettr)}, best schedule {show(whole.ideal)}"),
        ("compute", _flops(figures["flops_causal"].number()), "FLOP, causal"),
        ("cost", show(figures["money"]), "declared price"),
    ]


def _safety(now: Status) -> list[tuple[str, str]]:
    """What is known of how safe the run is."""
    found = now.incidents
    age = NOT_RECORDED if now.drilled_age_s is None else f"{duration(now.drilled_age_s)} old"
    newest = "none" if found.drilled is None else age
    facts = [("drills", found.drills), ("newest drilled checkpoint", newest), ("updates skipped", f"{found.skipped:,}")]
    if now.goodput is not None:
        facts.insert(0, ("failures", str(now.goodput.failures)))
    return [*facts, ("hosts in quarantine", ", ".join(found.quarantined) or "none")]


def _flops(value: float | None) -> str:
    return NOT_RECORDED if value is None else power_of_ten(value)


def _rows(ledger: Ledger) -> list[dict[str, Any]]:
    """The ledger's table: a row per attempt and stage, sums per stage where there are several, and the whole run."""
    accounts = [account for _, _, account in ledger.rows]
    sums = [account for account in ledger.stages.values() if len(account.attempts) > 1 and len(ledger.stages) > 1]
    return [_row(account, "") for account in accounts] + [_row(a, "sum") for a in [*sums, ledger.total]]


def _row(account: Account, style: str) -> dict[str, Any]:
    cells = []
    for name in COLUMNS:
        figure = account.figures[name]
        text = bare(figure)
        cells.append({"text": text, "method": f"{figure.method} ({figure.source})", "unknown": figure.value is None})
    return {"title": account.title, "cells": cells, "style": style}


def _corpus(data: Data) -> dict[str, str]:
    known = {"documents": data.documents, "tokens": data.tokens, "bytes": data.bytes}
    texts = {name: NOT_RECORDED if value is None else count(value) for name, value in known.items()}
    dropped = ", ".join(f"{count(n)} {why}" for why, n in data.dropped.items() if n)
    dropped = dropped or ("none" if data.dropped else NOT_RECORDED)
    return {"name": data.name, "source": data.source, "dropped": dropped, "fingerprint": data.fingerprint[:16], **texts}


def _facts(history: History) -> list[tuple[str, str]]:
    """Versions, devices and digests of the last attempt that said them."""
    start = next((a.start for a in reversed(history.attempts) if a.start), None)
    if start is None:
        return []
    devices = ", ".join(f"{n} × {name}" for name, n in start.devices.items()) or NOT_RECORDED
    facts = [("devices", devices), ("processes", str(start.world))]
    facts += [(name, value) for name, value in start.versions.items()]
    return facts + [(f"{name} digest", value[:16]) for name, value in start.digests.items()]
