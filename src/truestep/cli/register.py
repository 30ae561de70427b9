"""Which verbs there are. One short file each; a new verb is one new file and one line here."""

import typer

from truestep.cli import (
    chaos,
    chat,
    check,
    checkpoints,
    data,
    drill,
    export,
    merge,
    node,
    plan,
    replay,
    report,
    run,
    sample,
    show,
    status,
)


def verbs(app: typer.Typer) -> None:
    """Add every verb to the command line."""
    app.command()(run.run)
    app.command()(check.check)
    app.command()(show.show)
    app.command()(plan.plan)
    app.add_typer(data.app, name="data")
    app.command()(node.node)
    app.command()(status.status)
    app.command()(report.report)
    app.command()(replay.replay)
    app.command()(drill.drill)
    app.add_typer(checkpoints.app, name="checkpoints")
    app.command()(chaos.chaos)
    app.command()(export.export)
    app.command()(merge.merge)
    app.command()(sample.sample)
    app.command()(chat.chat)
