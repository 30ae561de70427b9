"""What `truestep plan --dry-run` prints: memory, collectives and FLOPs of ranks of a mesh."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from truestep.cli.mesh_cost import assumed_world, countable_model, stage_named
from truestep.errors import UserError
from truestep.recipe.load import load

if TYPE_CHECKING:
    from rich.table import Table

    from truestep.stages.dry_run_recipe import RankCost


def dry_run(
    recipe: str, overrides: Sequence[str], world: int | None, ranks: Sequence[int], stage: str | None, as_json: bool
) -> None:
    """Trace a step of `ranks` (by default those that tell the most) and print what it costs each of them."""
    from truestep.stages import dry_run_recipe

    loaded = load(recipe, list(overrides))
    model = countable_model(loaded)
    if model is None:
        raise UserError(
            f"{recipe}: a dry run needs the sizes of the model, which this recipe does not tell; give [model] with "
            f"vocab_size."
        )
    if loaded.numerics.reduction == "exact" or loaded.numerics.low_precision:
        given = "low_precision" if loaded.numerics.low_precision else 'reduction = "exact"'
        raise UserError(
            f"{recipe}: numerics.{given} cannot be traced by a dry run, which knows native sums and formats; leave "
            "[numerics] out of the recipe for a trace."
        )
    case = dry_run_recipe.Case.of(loaded, model, stage_named(loaded, stage), world or assumed_world(loaded))
    costs = dry_run_recipe.dry_run(case, list(ranks) or dry_run_recipe.telling_ranks(case), processes=2)
    if as_json:
        print(json.dumps([_plain(cost) for cost in costs], indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for cost in costs:
        console.print(_heading(cost, case.degrees.world), style="bold")
        console.print(_memory(cost))
        console.print(_traffic(cost))
        console.print(_flops(cost) + "\n")


def _plain(cost: "RankCost") -> dict:
    return {
        "rank": cost.rank,
        "place": cost.place._asdict(),
        "microbatches": cost.microbatches,
        "traced": cost.traced or "everything",
        "peak_bytes": cost.cost.peak_bytes,
        **asdict(cost.cost),
    }


def _heading(cost: "RankCost", world: int) -> str:
    place = ", ".join(f"{axis} {index}" for axis, index in cost.place._asdict().items())
    traced = f"; traced: {cost.traced}" if cost.traced else ""
    return f"rank {cost.rank:,} of {world:,} ({place}), {cost.microbatches} microbatches a step{traced}"


def _table(first: str, *others: str) -> "Table":
    from rich.table import Table

    table = Table(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _memory(cost: "RankCost") -> "Table":
    table = _table("memory at the peak", "GiB")
    for kind, size in cost.cost.memory.items():
        table.add_row(kind, _gib(size))
    table.add_row("all", _gib(cost.cost.peak_bytes), style="bold")
    return table


def _traffic(cost: "RankCost") -> "Table":
    table = _table("collectives of a step", "along", "count", "GiB")
    for traffic in cost.cost.traffic:
        table.add_row(traffic.kind, traffic.axis, f"{traffic.count:,}", _gib(traffic.bytes))
    return table


def _flops(cost: "RankCost") -> str:
    flops = cost.cost.flops
    return (
        f"parameters held {cost.cost.parameters:,}; FLOPs {sum(flops.values()):.4g} (forward {flops['forward']:.4g}, "
        f"backward {flops['backward']:.4g}, recomputed {flops['recomputed']:.4g})"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.3f}" if size >= 2**20 else f"{size / 2**30:.1g}" if size else "0"
