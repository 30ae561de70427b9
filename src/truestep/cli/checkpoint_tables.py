"""What `truestep checkpoints` shows: tables, lines and bars."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from truestep.checkpoint.of_run import Listed, StageStore
    from truestep.checkpoint.retention import Fate
    from truestep.checkpoint.sweep import Orphans


def _table(its: "StageStore", *columns: str) -> "Table":
    """An empty table of a stage's checkpoints."""
    from rich.markup import escape
    from rich.table import Table

    title = escape(f"{its.stage}: {its.store.url}")
    made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="right" if name in ("step", "epoch", "size", "age") else "left")
    return made


def listed(its: "StageStore", found: "list[Listed]") -> "Table":
    """The checkpoints of a stage, newest first."""
    import time

    from truestep.ledger.words import duration, size

    made = _table(its, "step", "epoch", "size", "age", "verified", "drilled", "", "places")
    now = time.time()
    for each in reversed(found):
        age = "not recorded" if each.saved_s is None else duration(max(0.0, now - each.saved_s))
        made.add_row(
            f"{each.committed.step:,}",
            str(each.committed.epoch),
            size(each.num_bytes),
            age,
            each.standing.verified or "[dim]no[/dim]",
            _drilled(each, now),
            _signs(each),
            ", ".join(each.places),
        )
    return made


def _drilled(each: "Listed", now: float) -> str:
    from truestep.ledger.words import duration

    drill = each.standing.drilled
    return f"{drill.facts.get('level', '')} {duration(max(0.0, now - drill.at_s))} ago" if drill else "[dim]no[/dim]"


def _signs(each: "Listed") -> str:
    from rich.markup import escape

    its = each.standing
    signs = ["[cyan]pinned[/cyan]"] if its.pinned else []
    signs += [f"[red]quarantined[/red]: {escape(its.quarantined)}"] if its.quarantined is not None else []
    signs += ["[yellow]deletion begun[/yellow]"] if its.deleting else []
    return "; ".join(signs)


def fated(its: "StageStore", found: "list[Fate]") -> "Table":
    made = _table(its, "step", "epoch", "")
    for fate in reversed(found):
        verdict = f"kept: {fate.kept}" if fate.kept else "[yellow]to be deleted[/yellow]"
        made.add_row(f"{fate.committed.step:,}", str(fate.committed.epoch), verdict)
    return made


def orphans(found: "Orphans") -> "Iterator[str]":
    from truestep.ledger.words import size

    yield from (f"{c.key}: a commit that no reader honours" for c in found.commits)
    yield from (f"{folder}: {size(num_bytes)} without a commit" for folder, num_bytes in found.folders.items())
    yield from (f"marks/{c.name}: of a checkpoint that is gone" for c in found.marks)
    yield from (f"{name}: {size(num_bytes)} of a dead writer" for name, num_bytes in found.temporaries.items())
    yield from (f"{upload.key}: an unfinished upload" for upload in found.uploads)


def say(text: str, style: str | None = None) -> None:
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(text, style=style, markup=False)


def show(what: "Table") -> None:
    from rich.console import Console

    Console(highlight=False).print(what)


@contextmanager
def bar(name: str, num_bytes: int) -> "Iterator[Callable[[int], None]]":
    """A progress bar over bytes, on a terminal; gives the function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as p:
        task = p.add_task(name, total=num_bytes)
        yield lambda count: p.update(task, advance=count)
