"""The command line. Nothing heavy is imported here; every verb imports what it needs when it runs."""

import os
import sys
import traceback

import typer

from truestep.errors import Again, HeardError, Lost, UserError

app = typer.Typer(
    name="truestep",
    help="Train large models from raw text to a gated release, and keep the run correct on the way.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """Run the command line, and let the agent of a worker know how it ends."""
    from truestep.elastic.lifeline import say_end

    try:
        _main()
    except SystemExit as end:
        say_end(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _main() -> None:
    """What is wrong outside the program is one sentence and exit code 2."""
    from truestep.cli import register
    from truestep.cli.verbs import WorkerFailed

    register.verbs(app)
    # A spinning OpenMP barrier takes several times as long as the work when a neighbour wants the core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.path.append(os.getcwd())  # code of the user's own is found here however truestep was started
    try:
        app()
    except WorkerFailed as error:
        if error.code != 2:
            print(f"truestep: {error}", file=sys.stderr)
        sys.exit(error.code if error.code > 0 else 128 - error.code)
    except HeardError:
        sys.exit(2)
    except Again:
        sys.exit(75)
    except UserError as error:
        for sentence in str(error).splitlines():
            print(f"truestep: {sentence}", file=sys.stderr)
        sys.exit(2)
    except Lost:  # somebody else says why
        sys.exit(70)
    except Exception:  # a worker's exit code must tell an error of the program from a gate, which is 1
        traceback.print_exc()
        sys.exit(70)
