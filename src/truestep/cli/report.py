"""`truestep report`: one HTML page about a run; or its log followed into TensorBoard."""

from pathlib import Path
from typing import Annotated

import typer

RunDir = Annotated[Path, typer.Argument(help="the run's directory, <run.dir>/<run.name>", metavar="RUN")]
Out = Annotated[
    Path | None, typer.Option("--out", help="where to write the page; by default RUN/report.html", metavar="FILE")
]
Board = Annotated[
    Path | None,
    typer.Option("--tensorboard", help="also write the log as TensorBoard events into this folder", metavar="DIR"),
]
Follow = Annotated[bool, typer.Option("--follow", help="with --tensorboard: go on until the run ends or Ctrl-C")]


def report(run: RunDir, out: Out = None, tensorboard: Board = None, follow: Follow = False) -> None:
    """Write one self-contained HTML page about RUN: loss, held-out figures, gradient norms, speed, ledger, gates."""
    from truestep.dashboard.report import write_report
    from truestep.errors import UserError

    if follow and tensorboard is None:
        raise UserError("--follow needs --tensorboard DIR: without it there is nothing to follow the log into")
    page = write_report(run, out or run / "report.html")
    print(f"wrote {page}")
    if tensorboard is not None:
        from truestep.runlog.sinks import TensorBoardSink, follow_log

        print(f"writing TensorBoard events to {tensorboard}" + (" until the run ends" if follow else ""))
        follow_log(run, [TensorBoardSink(tensorboard)], until_end=follow)
