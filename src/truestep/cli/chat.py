"""`truestep chat`: a conversation with a model on the terminal."""

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from truestep.cli.arguments import Adapter, Device, Module, Seed, Temperature, TopP
from truestep.errors import UserError

if TYPE_CHECKING:
    from truestep.rollout.chat import Chat

Model = Annotated[Path, typer.Argument(help="a model directory with a chat template", metavar="MODEL")]
Said = Annotated[
    list[str] | None,
    typer.Option("--message", help="say this, print the answer alone and leave; may be repeated, a turn each"),
]
System = Annotated[str | None, typer.Option("--system", help="instructions to the model")]
Length = Annotated[int, typer.Option("--max-new-tokens", help="longest answer", min=1)]
HELP = "/reset begins anew, /system TEXT with other instructions, /quit leaves; Ctrl-C stops an answer"


def chat(
    model: Model,
    message: Said = None,
    system: System = None,
    max_new_tokens: Length = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    adapter: Adapter = None,
    device: Device = "auto",
    module: Module = None,
) -> None:
    """Talk to MODEL through its own chat template; answers appear as they are made. Lines that come through a pipe are
    messages too."""
    from truestep.rollout.chat import open_chat

    talk = open_chat(
        model,
        system,
        adapter=adapter,
        own_module=module,
        device=device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    if message:
        for one in message:
            _answer(talk, one)
    else:
        _converse(talk, system)


def _answer(talk: "Chat", message: str) -> None:
    with closing(talk.stream(message)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print(flush=True)


def _converse(talk: "Chat", system: str | None) -> None:
    """Until /quit or the end of the input. What cannot be answered ends a script, but no person's conversation."""
    by_hand = sys.stdin.isatty()
    if by_hand:
        print(HELP)
    for line in _lines(by_hand):
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            return
        if command in ("/reset", "/system"):
            system = (rest.strip() or None) if command == "/system" else system
            talk.reset(system)
        elif command.startswith("/"):
            print(HELP)
        elif command:
            try:
                _answer(talk, line)
            except KeyboardInterrupt:
                print()
            except UserError as error:
                if not by_hand:
                    raise
                print(f"truestep: {error}", file=sys.stderr)


def _lines(by_hand: bool) -> Iterator[str]:
    if not by_hand:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() a history
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
