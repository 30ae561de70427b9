"""`truestep node`: let this machine take part in a run that is supervised elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from truestep.elastic.lifeline import die_with_launcher
from truestep.elastic.node import Node
from truestep.elastic.wire import read_token


def node(
    supervisor: Annotated[str, typer.Argument(help="where the supervisor listens", metavar="HOST:PORT")],
    token_file: Annotated[Path, typer.Option(help="file with the run's token")],
    processes: Annotated[
        int | None, typer.Option(help="processes to run here; by default machine.processes of the recipe", min=1)
    ] = None,
) -> None:
    """Join the run whose supervisor listens at HOST:PORT (`machine.elastic.listen`), and stay until it is over.

    SIGTERM, SIGUSR1 or Ctrl-C: the run saves a checkpoint and goes on without this machine.
    """
    die_with_launcher()
    Node(supervisor, read_token(token_file), processes).run()
