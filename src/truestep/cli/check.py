"""`truestep check`: is a recipe sound, and what will it take."""

from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from truestep.cli.arguments import Overrides, RecipePath
from truestep.cli.mesh_cost import (
    assumed_world,
    countable_model,
    mesh_cost,
    processes_words,
    setup_of,
)
from truestep.recipe import digests
from truestep.recipe.batch_schedule import BatchSchedule, step_rows
from truestep.recipe.check_mesh import Limits, degrees
from truestep.recipe.load import load
from truestep.recipe.model import ModelSection
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import TRAINED, Stage

World = Annotated[
    int | None, typer.Option("--world", help="processes of the job; by default as the recipe tells", min=1, max=2**24)
]


def check(recipe: RecipePath, world: World = None, set: Overrides = None) -> None:
    """Validate RECIPE without running it: every error at once, or what each stage and its mesh will take.

    FLOPs are forward and backward, attention counted causally, for rows that hold one document each.
    """
    loaded = load(recipe, set or [])
    model = countable_model(loaded)
    about_mesh = _mesh(loaded, model, world)
    console = Console()
    console.print(_stages(loaded, model))
    console.print(f"parameters  {_parameters(loaded, model)}")
    for name, digest in {"what": digests.what, "where": digests.where, "bits": digests.bits}.items():
        console.print(f"{name:<11} {digests.short(digest(loaded))}", highlight=False)
    for part in about_mesh:
        console.print(part, highlight=False)


def _mesh(recipe: Recipe, model: ModelSection | None, world: int | None) -> list[RenderableType]:
    """What the first stage of the recipe's own model costs each rank. Raises UserError for a mesh that cannot be."""
    ranks = world or assumed_world(recipe)
    note = processes_words(recipe, ranks)
    notes: list[RenderableType] = [note] if note else []
    if model is None:
        degrees(recipe.machine.mesh, Limits.of(recipe), ranks)
        return notes
    stage = next(stage for stage in recipe.stages if recipe.lineage(stage)[-1].start == "init")
    return [*mesh_cost(setup_of(recipe, model, stage, ranks)), *notes]


def _stages(recipe: Recipe, model: ModelSection | None) -> Table:
    table = Table("stage", title=f"{recipe.run.name}: the recipe is sound", title_justify="left")
    for heading in ("steps", "rows", "tokens", "rows a step", "FLOPs"):
        table.add_column(heading, justify="right")
    for stage in recipe.stages:
        table.add_row(stage.name, *_sizes(recipe, stage, model))
    return table


def _sizes(recipe: Recipe, stage: Stage, model: ModelSection | None) -> tuple[str, ...]:
    """Steps, rows, tokens, rows a step and FLOPs. How many steps some epochs are is known when the data is built."""
    if stage.kind not in TRAINED:
        return f"none: {stage.kind}", "", "", "", ""
    fewest, most = step_rows(stage)
    each = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    if stage.epochs:
        return f"{stage.epochs:g} epoch{'' if stage.epochs == 1 else 's'}", "", "", each, "not known yet"
    schedule = BatchSchedule.of(stage)
    tokens = schedule.total_rows * stage.context
    counted = model if recipe.lineage(stage)[-1].start == "init" else None
    flops = f"{counted.train_flops(tokens, stage.context):.3g}" if counted else "not known yet"
    return f"{schedule.steps:,}", f"{schedule.total_rows:,}", f"{tokens:,}", each, flops


def _parameters(recipe: Recipe, model: ModelSection | None) -> str:
    if model is None:
        own = recipe.model is not None and recipe.model.module is not None
        return "not known yet: " + (
            "your own module says" if own else "the model or tokenizer that it starts from says"
        )
    counts = model.counts()
    head = "tied" if model.tie_embeddings else f"{counts.head:,}"
    parts = f"embedding {counts.embedding:,}, head {head}, attention {counts.attention:,}, MLP {counts.mlp:,}"
    if model.moe is not None:
        parts += f", experts {counts.experts:,}, routers {counts.router:,}"
    active = f"; {counts.active:,} work on a token" if counts.active < counts.total else ""
    return f"{counts.total:,} ({parts}, norms {counts.norm:,}{active})"
