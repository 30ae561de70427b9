"""`truestep status`: where a run stands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from truestep.dashboard.status import Status

RunDir = Annotated[Path, typer.Argument(help="the run's directory, <run.dir>/<run.name>", metavar="RUN")]

_COLOURS = {"running": "green", "finished": "green", "stopped": "yellow", "silent": "yellow", "failed": "red"}
_VERDICTS = {"pass": "green", "fail": "red", "undecided": "yellow", "void": "yellow", "ungated": "yellow"}


def status(run: RunDir) -> None:
    """Say where RUN stands: its state, step, loss, speed, last checkpoint, held-out figures, gates and time left."""
    from rich.console import Console

    from truestep.dashboard.status import status as look

    Console(highlight=False).print(table(look(run)))


def table(now: "Status"):
    """The status as a rich table without borders."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    state = Text(now.state, style=f"bold {_COLOURS[now.state]}")
    grid.add_row(Text(now.run, style="bold not dim"), Text.assemble(state, f"  {now.says}"))
    for name, text in _rows(now):
        grid.add_row(name, Text(text))
    for stage, gate in now.gates.items():
        verdict = Text(gate.verdict.upper(), style=f"bold {_VERDICTS[gate.verdict]}")
        grid.add_row(f"gate {stage}", Text.assemble(verdict, f"  {gate.reason}"))
    for remark in now.remarks:
        grid.add_row("remark", Text(remark, style="yellow"))
    return grid


def _rows(now: "Status") -> list[tuple[str, str]]:
    from truestep.ledger.words import count, duration

    ranks = "" if now.world is None else ", 1 process" if now.world == 1 else f", {now.world} processes"
    rows = [("attempt", f"{now.attempt}{ranks}")]
    if now.stage is not None:
        place = f" ({now.stages.index(now.stage) + 1} of {len(now.stages)})" if now.stage in now.stages else ""
        rows.append(("stage", now.stage + place))
    if now.step is not None and now.steps:
        filled = round(30 * min(1.0, now.step / now.steps))
        bar = "━" * filled + "╌" * (30 - filled)
        rows.append(("step", f"{now.step:,} of {now.steps:,}  {bar}  {100 * now.step / now.steps:.0f} %"))
    if now.time_left_s:
        rows.append(("time left", f"{duration(now.time_left_s)} in this stage, at the pace so far"))
    if now.loss is not None:
        rows.append(("loss", f"{now.loss:.4f}" + ("" if now.lr is None else f", learning rate {now.lr:.3g}")))
    if now.tokens_per_s is not None:
        rows.append(("speed", f"{count(now.tokens_per_s)} tokens/s, {now.step_s:.3g} s a step"))
    if now.held_out is not None:
        bits = now.held_out.bits_per_byte
        figures = f"loss {now.held_out.loss:.4f}" + ("" if bits is None else f", {bits:.4f} bits per byte")
        rows.append(("held-out", f"{figures} (step {now.held_out.step:,})"))
        if now.held_out.high_loss is not None:
            gap = now.held_out.loss - now.held_out.high_loss
            rows.append(("low precision", f"costs {gap:+.4f} nats per token there"))
    saved = "none yet"
    if now.saved is not None and now.saved_age_s is not None:
        saved = f"step {now.saved.step:,} of {now.saved.stage}, {duration(now.saved_age_s)} ago"
    failures = f"; the last {now.failed_saves} failed" if now.failed_saves else ""
    rows.append(("checkpoint", saved + failures))
    return rows + _safety(now) + [("last record", f"{duration(now.age_s)} ago")]


def _safety(now: "Status") -> list[tuple[str, str]]:
    """Goodput, drills, and what was found wrong so far."""
    from truestep.ledger.incidents import where, words
    from truestep.ledger.words import duration, show

    found, rows = now.incidents, list[tuple[str, str]]()
    if now.goodput is not None:
        times = now.goodput.failures
        failed = f", {times} failure{'s' if times != 1 else ''}" if times else ""
        rows.append(("goodput", f"{show(now.goodput.goodput)}, ETTR {show(now.goodput.ettr)}{failed}"))
    if found.drill_every_s == 0:
        rows.append(("drills", "OFF: no restore is tried out (checkpoint.drill_every)"))
    elif found.drilled is not None:
        age = "" if now.drilled_age_s is None else f", {duration(now.drilled_age_s)} old"
        rows.append(("drilled", f"the checkpoint of {where(found.drilled.event)}{age}: {words(found.drilled.event)}"))
    elif found.drill_every_s is not None:
        rows.append(("drilled", "no checkpoint yet"))
    if found.skipped:
        rows.append(("skipped", f"{found.skipped} update{'s' if found.skipped != 1 else ''} left out"))
    if found.quarantined:
        rows.append(("quarantined", ", ".join(found.quarantined)))
    if found.faults:
        last = found.faults[-1]
        ago = duration(max(0.0, now.now_s - last.time_s))
        rows.append(("faults", f"{len(found.faults)}; the last, {ago} ago: {words(last.event)} ({where(last.event)})"))
    return rows
