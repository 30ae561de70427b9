"""`truestep check`: is a recipe sound, and what will it take."""

from rich.console import Console
from rich.table import Table

from truestep.cli.arguments import Overrides, RecipePath
from truestep.recipe import digests
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.check_model import tokenizer_size
from truestep.recipe.load import load
from truestep.recipe.model import ModelSection
from truestep.recipe.recipe import Recipe


def check(recipe: RecipePath, set: Overrides = None) -> None:
    """Validate RECIPE without running it: every error at once, or what each stage will take.

    FLOPs are forward and backward, attention counted causally, for rows that hold one document each.
    """
    loaded = load(recipe, set or [])
    model = countable_model(loaded)
    console = Console()
    console.print(_stages(loaded, model))
    console.print(f"parameters  {_parameters(loaded, model)}")
    for name, digest in {"what": digests.what, "where": digests.where, "bits": digests.bits}.items():
        console.print(f"{name:<11} {digests.short(digest(loaded))}", highlight=False)


def countable_model(recipe: Recipe) -> ModelSection | None:
    """The model that stages from "init" train, resolved; None where the recipe alone does not tell its size."""
    model = recipe.model
    size = tokenizer_size(recipe) or (model.vocab_size if model else 0)
    return model.resolved(size) if model is not None and model.module is None and size else None


def _stages(recipe: Recipe, model: ModelSection | None) -> Table:
    table = Table("stage", title=f"{recipe.run.name}: the recipe is sound", title_justify="left")
    for heading in ("steps", "rows", "tokens", "rows a step", "FLOPs"):
        table.add_column(heading, justify="right")
    for stage in recipe.stages:
        schedule = BatchSchedule.of(stage)
        first, last = schedule.rows_in(0), schedule.rows_in(schedule.steps - 1)
        size = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        tokens = schedule.total_rows * stage.context
        counted = model if recipe.lineage(stage)[-1].start == "init" else None
        flops = f"{counted.train_flops(tokens, stage.context):.3g}" if counted else "not known yet"
        table.add_row(stage.name, f"{schedule.steps:,}", f"{schedule.total_rows:,}", f"{tokens:,}", size, flops)
    return table


def _parameters(recipe: Recipe, model: ModelSection | None) -> str:
    if model is None:
        own = recipe.model is not None and recipe.model.module is not None
        return "not known yet: " + (
            "your own module says" if own else "the model or tokenizer that it starts from says"
        )
    counts = model.counts()
    head = "tied" if model.tie_embeddings else f"{counts.head:,}"
    parts = f"embedding {counts.embedding:,}, head {head}, attention {counts.attention:,}, MLP {counts.mlp:,}"
    return f"{counts.total:,} ({parts}, norms {counts.norm:,})"
