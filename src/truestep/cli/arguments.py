"""What several verbs take: a recipe and overrides of its fields; what a model generates with."""

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[str, typer.Argument(help="the recipe, a TOML file", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="override a field, stages by name: stages.base.optim.lr=3e-4; PATH= takes the field out; may be repeated",
    ),
]
Module = Annotated[
    str | None,
    typer.Option(
        "--module",
        metavar="PACKAGE.MODULE:CLASS",
        help="a model of your own: the module that the directory names, to say that its code may run",
    ),
]
Adapter = Annotated[
    Path | None,
    typer.Option("--adapter", help="a low-rank adapter for the model, in PEFT's layout", metavar="DIRECTORY"),
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token each time", min=0.0)]
TopP = Annotated[float, typer.Option("--top-p", help="draw from the likeliest tokens of this share", min=0, max=1)]
Seed = Annotated[int, typer.Option("--seed", help="another seed draws another text", min=0)]
Device = Annotated[str, typer.Option("--device", help="auto (a GPU where there is one), cpu or cuda")]
