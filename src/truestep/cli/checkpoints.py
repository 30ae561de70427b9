"""`truestep checkpoints`: look at a run's checkpoints, verify, pin, prune and sweep them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from truestep.checkpoint.of_run import Listed, StageStore
    from truestep.checkpoint.retention import Fate, Policy
    from truestep.checkpoint.sealed import Committed
    from truestep.checkpoint.sweep import Orphans

app = typer.Typer(help="Look at a run's checkpoints, verify, pin, prune and sweep them.", no_args_is_help=True)

RunDir = Annotated[Path, typer.Argument(help="the run's directory, <run.dir>/<run.name>", metavar="RUN")]
OneStage = Annotated[str | None, typer.Option("--stage", help="one stage; by default all that have begun")]
Step = Annotated[int, typer.Argument(help="the step of the checkpoint", metavar="STEP")]
Why = Annotated[str, typer.Option("--reason", help="why, for whoever looks at it later")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be done, and do nothing")]


@app.command("list")
def list_(run: RunDir, stage: OneStage = None) -> None:
    """List the checkpoints of RUN that count, with what is known of each. Exit code 2 if one is lost."""
    from rich.console import Console

    from truestep.checkpoint.of_run import stage_stores
    from truestep.errors import CheckpointError

    console, lost = Console(highlight=False), []
    for its in stage_stores(run, stage):
        found = its.listed()
        console.print(table(its, found))
        for each in found:
            for note in each.notes:
                console.print(f"{each.committed.key}: {note}", style="yellow", markup=False)
        lost += [f"{its.store.url}/{c.key}: is listed but gone; restore it from a copy" for c in its.lost()]
    if lost:
        raise CheckpointError("\n".join(lost))


@app.command()
def verify(
    run: RunDir,
    step: Annotated[int | None, typer.Option("--step", help="one checkpoint; by default all")] = None,
    stage: OneStage = None,
) -> None:
    """Read every byte of RUN's checkpoints from the store and compare it with what was saved. Whole ones are marked as
    verified, damaged ones as quarantined: no reader takes them any more. Exit code 2 if anything is damaged."""
    from truestep.checkpoint.upkeep import verify_and_mark
    from truestep.errors import CheckpointError

    damage: list[str] = []
    for its, found in _chosen(run, stage, step):
        for each in found:
            with _bar(f"{its.stage} step {each.committed.step}", each.num_bytes) as advance:
                wrong = verify_and_mark(its.store, each.committed, advance)
            damage += [one.text for one in wrong]
            verdict = "[green]every byte as saved[/green]" if not wrong else f"[red]{len(wrong)} damaged[/red]"
            if not wrong and each.standing.quarantined:
                verdict += "; still quarantined, until `truestep checkpoints release`"
            _say(f"{its.stage} step {each.committed.step:,}: {verdict}")
    if damage:
        raise CheckpointError("\n".join(damage))


@app.command()
def pin(run: RunDir, step: Step, stage: OneStage = None, reason: Why = "") -> None:
    """Have retention leave the checkpoint of STEP alone, for ever or until it is unpinned."""
    from truestep.checkpoint.retention import pin as do

    its, committed = _one(run, stage, step)
    do(its.store, committed, reason=reason)
    _say(f"{its.stage} step {step:,} is pinned")


@app.command()
def unpin(run: RunDir, step: Step, stage: OneStage = None) -> None:
    """Let retention treat the checkpoint of STEP as any other again."""
    from truestep.checkpoint.marks import mark

    its, committed = _one(run, stage, step)
    mark(its.store, committed, "unpinned")
    _say(f"{its.stage} step {step:,} is not pinned any more")


@app.command()
def quarantine(run: RunDir, step: Step, stage: OneStage = None, reason: Why = "by hand") -> None:
    """Have every reader pass the checkpoint of STEP over."""
    from truestep.checkpoint.marks import mark

    its, committed = _one(run, stage, step)
    mark(its.store, committed, "quarantined", reason=reason)
    _say(f"{its.stage} step {step:,} is quarantined: {reason}")


@app.command()
def release(run: RunDir, step: Step, stage: OneStage = None) -> None:
    """Let readers take the checkpoint of STEP again, after a quarantine."""
    from truestep.checkpoint.marks import mark

    its, committed = _one(run, stage, step)
    mark(its.store, committed, "released")
    _say(f"{its.stage} step {step:,} is released")


@app.command()
def prune(
    run: RunDir,
    stage: OneStage = None,
    keep: Annotated[int | None, typer.Option("--keep", help="instead of checkpoint.keep", min=1)] = None,
    keep_every: Annotated[int | None, typer.Option("--keep-every", help="instead of checkpoint.keep_every")] = None,
    dry_run: DryRun = False,
) -> None:
    """Delete the checkpoints that the recipe's policy does not keep: never one that is pinned, the newest, in use, or
    not followed by enough verified ones. A deletion that was cut short is finished."""
    from truestep.checkpoint.of_run import stage_stores
    from truestep.checkpoint.retention import fates, retain
    from truestep.ledger.words import size

    for its in stage_stores(run, stage):
        policy, used = _policy(its, keep, keep_every), its.in_use()
        _print(_fates(its, fates(its.store, policy, used)))
        if not dry_run:
            done = retain(its.store, policy, used)
            _say(f"{its.stage}: deleted {len(done.deleted)}, freed {size(done.num_bytes)}, {done.kept} left")
            for note in done.notes:
                _say(f"[yellow]{note}[/yellow]")


@app.command()
def sweep(
    run: RunDir,
    stage: OneStage = None,
    older: Annotated[str, typer.Option("--older", help="age of temporary files and unfinished uploads")] = "24h",
    dry_run: DryRun = False,
) -> None:
    """Remove what crashed saves and superseded attempts of RUN left behind. What the newest attempt writes is left
    alone."""
    from truestep.checkpoint.of_run import stage_stores
    from truestep.checkpoint.sweep import plan_sweep
    from truestep.checkpoint.sweep import sweep as do
    from truestep.errors import UserError
    from truestep.ledger.words import size
    from truestep.recipe.units import parse_seconds

    try:
        older_s = parse_seconds(older)
    except ValueError as error:
        raise UserError(f"--older: {error}") from None
    for its in stage_stores(run, stage):
        found = plan_sweep(its.store, older_s)
        for line in _orphans(found):
            _say(line)
        freed = found.num_bytes if dry_run else do(its.store, found)
        _say(f"{its.stage}: {'would remove' if dry_run else 'removed'} {found.count} things, {size(freed)}")


def table(its: "StageStore", found: "list[Listed]") -> "Table":
    """The checkpoints of a stage, newest first."""
    import time

    from rich.table import Table

    from truestep.ledger.words import duration, size

    columns = ("step", "epoch", "size", "age", "verified", "drilled", "", "places")
    made = Table(title=f"{its.stage}: {its.store.url}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="right" if name in ("step", "epoch", "size", "age") else "left")
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


def _fates(its: "StageStore", found: "list[Fate]") -> "Table":
    from rich.table import Table

    made = Table("step", "epoch", "", title=f"{its.stage}: {its.store.url}", title_justify="left", box=None)
    for fate in reversed(found):
        verdict = f"kept: {fate.kept}" if fate.kept else "[yellow]to be deleted[/yellow]"
        made.add_row(f"{fate.committed.step:,}", str(fate.committed.epoch), verdict)
    return made


def _orphans(found: "Orphans") -> "Iterator[str]":
    from truestep.ledger.words import size

    yield from (f"[yellow]{note}[/yellow]" for note in found.notes)
    yield from (f"{c.key}: a commit that no reader honours" for c in found.commits)
    yield from (f"{folder}: {size(num_bytes)} without a commit" for folder, num_bytes in found.folders.items())
    yield from (f"marks/{c.name}: of a checkpoint that is gone" for c in found.marks)
    yield from (f"{name}: {size(num_bytes)} of a dead writer" for name, num_bytes in found.temporaries.items())
    yield from (f"{upload.key}: an unfinished upload" for upload in found.uploads)


def _policy(its: "StageStore", keep: int | None, keep_every: int | None) -> "Policy":
    from truestep.checkpoint.retention import Policy
    from truestep.errors import UserError

    settings = its.recipe.checkpoint
    wanted = Policy(keep or settings.keep, settings.keep_every if keep_every is None else keep_every)
    if wanted.keep < 1:
        raise UserError("the recipe's checkpoint.keep is 0, which keeps all checkpoints; say how many with --keep")
    return wanted


def _chosen(run: Path, stage: str | None, step: int | None) -> "list[tuple[StageStore, list[Listed]]]":
    from truestep.checkpoint.of_run import stage_stores

    if step is None:
        return [(its, its.listed()) for its in stage_stores(run, stage)]
    its, committed = _one(run, stage, step)
    return [(its, [each for each in its.listed() if each.committed == committed])]


def _one(run: Path, stage: str | None, step: int) -> "tuple[StageStore, Committed]":
    """A checkpoint by its step: of the stage that is named, else of the last that has begun."""
    from truestep.checkpoint.of_run import stage_stores

    its = stage_stores(run, stage)[-1]
    return its, its.find(step)


def _say(text: str) -> None:
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(text)


def _print(what: "Table") -> None:
    from rich.console import Console

    Console(highlight=False).print(what)


@contextmanager
def _bar(name: str, num_bytes: int) -> "Iterator[Callable[[int], None]]":
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
