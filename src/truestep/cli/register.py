"""Which verbs there are. One short file each; a new verb is one new file and one line here."""

import typer

from truestep.cli import check, run, show


def verbs(app: typer.Typer) -> None:
    """Add every verb to the command line."""
    app.command()(run.run)
    app.command()(check.check)
    app.command()(show.show)
