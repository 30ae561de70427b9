"""What a run took, from its log alone: tokens, FLOPs, wall time by phase, MFU, goodput, device-hours, money.

Conventions (docs of the recipe's model section give the counting rule itself):
  model FLOPs   every token that went through a training step, steps done again included, times the FLOPs per token that
                the stage declared; causal counts T(T+1)/2 query-key pairs, full T^2. Evaluation is not counted.
  MFU           model FLOPs / (seconds in steps x devices x peak): how well steps use the devices
  MFU of all    model FLOPs / (all seconds x devices x peak): what is left after start-up, stalls and the rest
  goodput       productive seconds / all seconds. Productive is a step's time less its wait for data, unless the step
                was done before (rework).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from truestep.factors.devices import device_peak
from truestep.ledger.figure import Figure, missing
from truestep.ledger.history import Attempt, History, Span

PRODUCTIVE, DATA_WAIT, REWORK = "productive", "data wait", "rework"
STALL, EVALUATION, STARTUP, RESTART, OTHER = "checkpoint stall", "evaluation", "start-up", "restart", "other"


@dataclass(frozen=True)
class Account:
    """Figures over some spans: a stage in one attempt, a stage, an attempt, or the whole run."""

    title: str
    attempts: list[int]
    figures: dict[str, Figure]
    phases_s: dict[str, float]  # adds up to the wall time, `other` being what no record accounts for

    def value(self, name: str) -> float | None:
        """The number of a figure, None where it is not recorded."""
        return self.figures[name].number()


@dataclass(frozen=True)
class Ledger:
    """`rows` per attempt and stage; their sums per stage and attempt, and in all."""

    rows: list[tuple[int, str | None, Account]]
    stages: dict[str, Account]
    attempts: dict[int, Account]
    total: Account


def build_ledger(history: History) -> Ledger:
    """The accounts of a run."""
    rows = []
    for attempt in history.attempts:
        for stage in dict.fromkeys(span.stage for span in attempt.spans):
            spans = [span for span in attempt.spans if span.stage == stage]
            rows.append((attempt.number, stage, account(f"attempt {attempt.number}, {stage or 'no stage'}", spans)))
    return Ledger(
        rows=rows,
        stages={name: account(f"stage {name}", history.of_stage(name)) for name in history.stages()},
        attempts={a.number: account(f"attempt {a.number}", a.spans) for a in history.attempts},
        total=account("whole run", history.spans),
    )


def account(title: str, spans: Sequence[Span]) -> Account:
    """The figures of some spans. A quantity that one span lacks is not recorded for their sum either."""
    wall_s = sum(span.wall_s for span in spans)
    phases_s = phases(spans)
    kept = sum(step.tokens for span in spans for step, again in zip(span.steps, span.again) if not again)
    repeated = sum(step.tokens for span in spans for step, again in zip(span.steps, span.again) if again)
    num_steps = sum(not again for span in spans for again in span.again)
    killed = [str(span.attempt.number) for span in spans if span.attempt.end is None]
    until = "from the command" if all(s.attempt.start and s.attempt.start.launched_s for s in spans) else "from the log"
    end = f"; attempt {', '.join(dict.fromkeys(killed))} until its last record" if killed else ""
    figures = {
        "steps": Figure(num_steps, "steps", "optimizer steps, each counted once"),
        "tokens": Figure(kept, "tokens", "tokens of these steps"),
        "tokens_repeated": Figure(repeated, "tokens", "tokens of steps done again after a resume or roll-back"),
        "wall": Figure(wall_s, "s", f"{until} to the end of each attempt{end}"),
        "goodput": _ratio(phases_s[PRODUCTIVE], wall_s, "productive seconds / all seconds"),
        "device_hours": _sum(spans, _device_hours, "device-hours", "devices held x wall time"),
        "flops_causal": _sum(spans, lambda s: _flops(s, "causal"), "FLOP", _flops_method(spans, "causal")),
        "flops_full": _sum(spans, lambda s: _flops(s, "full"), "FLOP", _flops_method(spans, "full")),
        "step_peak": _sum(spans, _step_peak, "FLOP", "seconds in steps x devices x peak"),
        "wall_peak": _sum(spans, _wall_peak, "FLOP", "wall time x devices x peak"),
        "money": _money(spans),
    }
    for kind in ("causal", "full"):
        flops = figures[f"flops_{kind}"]
        figures[f"mfu_{kind}"] = _mfu(spans, flops, figures["step_peak"], "seconds in steps")
        figures[f"mfu_all_{kind}"] = _mfu(spans, flops, figures["wall_peak"], "all seconds")
    return Account(title, list(dict.fromkeys(span.attempt.number for span in spans)), figures, phases_s)


def phases(spans: Sequence[Span]) -> dict[str, float]:
    """Wall seconds by phase; they add up to the spans' wall time. `other` below zero means that phases overlap."""
    total: dict[str, float] = defaultdict(float, {PRODUCTIVE: 0.0})
    for span in spans:
        for step, again in zip(span.steps, span.again):
            total[REWORK if again else PRODUCTIVE] += step.step_s
            if step.data_s is not None:  # else the wait stays within the step
                total[REWORK if again else PRODUCTIVE] -= step.data_s
                total[DATA_WAIT] += step.data_s
        for phase in span.phases:
            total[phase.name] += phase.seconds
        total[EVALUATION] += sum(e.eval_s for e in span.evals)
        total[STALL] += sum(s.stall_s for s in span.saves)
        total[STARTUP if span.attempt.number == 1 else RESTART] += span.startup_s or 0.0
    total[OTHER] = sum(span.wall_s for span in spans) - sum(total.values())
    return dict(total)


def num_devices(attempt: Attempt) -> int | None:
    """Devices the attempt held; None if it does not say."""
    return sum(attempt.start.devices.values()) or None if attempt.start else None


def peak_of(span: Span) -> tuple[float, str] | None:
    """FLOP/s of all devices of a span together, and the figure's source: declared by the stage, else the table."""
    devices = span.attempt.start.devices if span.attempt.start else {}
    if span.start is None or not devices:
        return None
    if span.start.peak_flops is not None:
        source = span.start.peak_source or "declared, source not recorded"
        return span.start.peak_flops * sum(devices.values()), source
    peaks = {name: device_peak(name, span.start.precision or "") for name in devices}
    known = {name: peak for name, peak in peaks.items() if peak is not None}
    if len(known) < len(peaks):
        return None
    sources = dict.fromkeys(f"{name}: {peak.source}" for name, peak in known.items())
    return sum(known[name].flops * count for name, count in devices.items()), "; ".join(sources)


def _sum(spans: Sequence[Span], of: Callable[[Span], float | None], unit: str, method: str) -> Figure:
    values = [of(span) for span in spans]
    lacking = dict.fromkeys(span.attempt.number for span, value in zip(spans, values) if value is None)
    if lacking or not spans:
        return missing(unit, f"{method}; not recorded for attempt {', '.join(map(str, lacking)) or '-'}")
    return Figure(sum(value for value in values if value is not None), unit, method)


def _ratio(part: float, whole: float, method: str) -> Figure:
    return Figure(part / whole, "1", method) if whole > 0 else missing("1", f"{method}; no time has passed")


def _device_hours(span: Span) -> float | None:
    devices = num_devices(span.attempt)
    return None if devices is None else devices * span.wall_s / 3600


def _flops(span: Span, kind: str) -> float | None:
    tokens = sum(step.tokens for step in span.steps)
    if not tokens:
        return 0.0  # nothing was trained, whatever the rule
    start = span.start
    per_token = start and (start.train_flops_per_token_causal if kind == "causal" else start.train_flops_per_token_full)
    return None if per_token is None else per_token * tokens


def _flops_method(spans: Sequence[Span], kind: str) -> str:
    rules = dict.fromkeys(s.start.flops_rule or "rule not recorded" for s in spans if s.start)
    pairs = "causal query-key pairs" if kind == "causal" else "all T^2 query-key pairs"
    return f"rule {', '.join(rules) or 'not recorded'}, {pairs}; training tokens, repeated ones included; no evaluation"


def _step_peak(span: Span) -> float | None:
    peak = peak_of(span)
    return 0.0 if not span.steps else None if peak is None else span.step_s * peak[0]


def _wall_peak(span: Span) -> float | None:
    peak = peak_of(span)
    return None if peak is None else span.wall_s * peak[0]


def _mfu(spans: Sequence[Span], flops: Figure, capacity: Figure, seconds: str) -> Figure:
    method = f"model FLOPs / ({seconds} x devices x peak); {flops.method}"
    sources = dict.fromkeys(peak[1] for span in spans if (peak := peak_of(span)))
    done, could = flops.number(), capacity.number()
    if done is None or not could:
        lacking = flops.method if done is None else "no peak is known" if could is None else "no steps"
        return missing("1", f"{method}; {lacking}")
    return Figure(done / could, "1", method, f"run log; peak from {'; '.join(sources)}")


def _money(spans: Sequence[Span]) -> Figure:
    currencies = {s.attempt.start.currency for s in spans if s.attempt.start and s.attempt.start.currency}
    unit = currencies.pop() if len(currencies) == 1 else "money"
    if currencies:
        return missing(unit, "device-hours x declared price; attempts were priced in different currencies")
    return _sum(spans, _price, unit, "device-hours x declared price of a device-hour")


def _price(span: Span) -> float | None:
    hours, price = _device_hours(span), span.attempt.start and span.attempt.start.price_per_device_hour
    return None if hours is None or price is None else hours * price
