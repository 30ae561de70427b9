"""`truestep checkpoints`: look at a run's checkpoints, verify, pin, prune and sweep them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from truestep.cli.checkpoint_tables import bar, fated, listed, orphans, say, show

if TYPE_CHECKING:
    from truestep.checkpoint.marks import Kind
    from truestep.checkpoint.of_run import Listed, StageStore
    from truestep.checkpoint.retention import Policy
    from truestep.checkpoint.sealed import Committed

app = typer.Typer(help="Look at a run's checkpoints, verify, pin, prune and sweep them.", no_args_is_help=True)

RunDir = Annotated[Path, typer.Argument(help="the run's directory, <run.dir>/<run.name>", metavar="RUN")]
OneStage = Annotated[str | None, typer.Option("--stage", help="one stage; by default all that have begun")]
Step = Annotated[int, typer.Argument(help="the step of the checkpoint", metavar="STEP")]
Why = Annotated[str, typer.Option("--reason", help="why, for whoever looks at it later")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be done, and do nothing")]


@app.command("list")
def list_(run: RunDir, stage: OneStage = None) -> None:
    """List the checkpoints of RUN that count, with what is known of each. Exit code 2 if one is lost."""
    from truestep.checkpoint.of_run import stage_stores
    from truestep.errors import CheckpointError

    lost: list[str] = []
    for its in stage_stores(run, stage):
        found = its.listed()
        show(listed(its, found))
        for each in found:
            for note in each.notes:
                say(f"{each.committed.key}: {note}", style="yellow")
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
    from truestep.checkpoint.catalogue import list_committed
    from truestep.checkpoint.upkeep import verify_and_mark
    from truestep.errors import CheckpointError

    damage: list[str] = []
    for its, found in _chosen(run, stage, step):
        for each in found:
            name = f"{its.stage} step {each.committed.step:,} (epoch {each.committed.epoch})"
            with bar(name, each.num_bytes) as advance:
                wrong = verify_and_mark(its.store, each.committed, advance)
            damage += [one.text for one in wrong]
            verdict = f"{len(wrong)} damaged" if wrong else "every byte as saved"
            if each.committed not in list_committed(its.store):
                verdict = "deleted meanwhile"
            elif not wrong and each.standing.quarantined:
                verdict += "; still quarantined, until `truestep checkpoints release`"
            say(f"{name}: {verdict}", style="red" if wrong else "green")
    if damage:
        raise CheckpointError("\n".join(damage))


@app.command()
def pin(run: RunDir, step: Step, stage: OneStage = None, reason: Why = "") -> None:
    """Have retention leave the checkpoint of STEP alone, for ever or until it is unpinned."""
    from truestep.checkpoint.retention import pin as do

    its, committed = _one(run, stage, step)
    do(its.store, committed, reason=reason)
    say(f"{its.stage} step {step:,} is pinned")


@app.command()
def unpin(run: RunDir, step: Step, stage: OneStage = None) -> None:
    """Let retention treat the checkpoint of STEP as any other again."""
    _mark(run, stage, step, "unpinned", "is not pinned any more")


@app.command()
def quarantine(run: RunDir, step: Step, stage: OneStage = None, reason: Why = "by hand") -> None:
    """Have every reader pass the checkpoint of STEP over."""
    _mark(run, stage, step, "quarantined", f"is quarantined: {reason}", reason=reason)


@app.command()
def release(run: RunDir, step: Step, stage: OneStage = None) -> None:
    """Let readers take the checkpoint of STEP again, after a quarantine."""
    _mark(run, stage, step, "released", "is released")


@app.command()
def prune(
    run: RunDir,
    stage: OneStage = None,
    keep: Annotated[int | None, typer.Option("--keep", help="instead of checkpoint.keep", min=1)] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", help="instead of checkpoint.keep_every", min=0)
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Delete the checkpoints that the recipe's policy does not keep: never one that is pinned, the newest, in use, or
    not followed by enough verified ones. A deletion that was cut short is finished."""
    from truestep.checkpoint.of_run import stage_stores
    from truestep.checkpoint.retention import fates, retain
    from truestep.ledger.words import size

    for its in stage_stores(run, stage):
        policy, used = _policy(its, keep, keep_every), its.in_use()
        show(fated(its, fates(its.store, policy, used)))
        if not dry_run:
            done = retain(its.store, policy, used)
            say(f"{its.stage}: deleted {len(done.deleted)}, freed {size(done.num_bytes)}, {done.kept} left")
            for note in done.notes:
                say(note, style="yellow")


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
        for note in found.notes:
            say(note, style="yellow")
        for line in orphans(found):
            say(line)
        freed = found.num_bytes if dry_run else do(its.store, found)
        say(f"{its.stage}: {'would remove' if dry_run else 'removed'} {found.count} things, {size(freed)}")


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


def _mark(run: Path, stage: str | None, step: int, kind: "Kind", done: str, **facts: str) -> None:
    from truestep.checkpoint.marks import mark

    its, committed = _one(run, stage, step)
    mark(its.store, committed, kind, **facts)
    say(f"{its.stage} step {step:,} {done}")
