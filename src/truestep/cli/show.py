"""`truestep show`: the resolved recipe, or the schema of recipes."""

import json
from typing import Annotated

import typer

from truestep.cli.arguments import Overrides
from truestep.errors import UserError
from truestep.recipe.load import dump, json_schema, load

RecipeIfAny = Annotated[str | None, typer.Argument(help="the recipe, a TOML file", metavar="[RECIPE]")]
Schema = Annotated[bool, typer.Option("--schema", help="print the JSON schema of recipes, for editors, instead")]


def show(recipe: RecipeIfAny = None, set: Overrides = None, schema: Schema = False) -> None:
    """Print RECIPE resolved: every value with its type, as TOML that runs as it is."""
    if schema == (recipe is not None):
        raise UserError("truestep show takes a recipe, or --schema alone; give one of them.")
    if recipe is None:
        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    else:
        print(dump(load(recipe, set or [])), end="")
