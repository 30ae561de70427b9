"""What several verbs take: a recipe and overrides of its fields."""

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
