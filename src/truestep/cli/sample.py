"""`truestep sample`: completions by a model."""

from pathlib import Path
from typing import Annotated

import typer

from truestep.cli.arguments import Adapter, Device, Module, Seed, Temperature, TopP

Model = Annotated[Path, typer.Argument(help="a model directory, as a run or `export` writes it", metavar="MODEL")]
Prompts = Annotated[list[str], typer.Argument(help="texts to complete", metavar="PROMPT...")]
Length = Annotated[int, typer.Option("--max-new-tokens", help="longest completion", min=1)]


def sample(
    model: Model,
    prompts: Prompts,
    max_new_tokens: Length = 64,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    adapter: Adapter = None,
    device: Device = "auto",
    module: Module = None,
) -> None:
    """Complete each PROMPT with MODEL and print both, the completion in green. For answers to messages see `chat`."""
    from rich.console import Console
    from rich.text import Text

    from truestep.rollout.directory import sample_from

    where = {"adapter": adapter, "own_module": module, "device": device}
    texts = sample_from(model, prompts, max_new_tokens, temperature, top_p, seed, **where)
    for prompt, text in zip(prompts, texts):
        Console().print(Text(prompt) + Text(text, style="green"), soft_wrap=True)
