"""What `truestep check` and `truestep plan` say of a mesh: memory, bubble and traffic of a rank, by formulas."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from math import prod
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from truestep.errors import UserError
from truestep.plan.memory import RankMemory, rank_memory, recomputation
from truestep.plan.schedule import FORMULAS, bubble
from truestep.plan.setup import Setup
from truestep.plan.traffic import Traffic, traffic
from truestep.recipe.batch_schedule import step_rows
from truestep.recipe.check_mesh import Limits, asked_of, degrees
from truestep.recipe.check_model import tokenizer_size
from truestep.recipe.degrees import AXES
from truestep.recipe.load import load
from truestep.recipe.model import ModelSection
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import TRAINED, Stage

MOST_ROWS = 16
_SHORT = {"parameters": "weights", "gradients": "grads", "optimizer": "optim", "activations": "activ"}
"""Headings that fit a narrow terminal; --json has the words in full."""
BASIS = (
    "by formulas: weights, gradients and optimizer state as ZeRO shares them out (arXiv 1910.02054); activations as "
    "the tensors that blocks save for the backward pass (after arXiv 2205.05198), times the microbatches in flight of "
    "the schedule; traffic as rings send it. `truestep plan --dry-run` traces a step instead."
)


def assumed_world(recipe: Recipe) -> int:
    """Processes of the job, as far as the recipe tells: its degrees, where none is left open, else machine.processes
    where the mesh fits them, else the fewest that the mesh needs."""
    asked = asked_of(recipe.machine.mesh)
    known = prod(asked[axis] or 1 for axis in AXES)
    open_axis = None in [asked[axis] for axis in AXES]
    return recipe.machine.processes if open_axis and recipe.machine.processes % known == 0 else known


def setup_of(recipe: Recipe, model: ModelSection, stage: Stage, world: int) -> Setup:
    """The plan of the largest step of a stage on `world` processes. `model` is resolved. Raises UserError for a mesh
    that cannot be."""
    mesh = degrees(recipe.machine.mesh, Limits.of(recipe, model), world)
    return Setup(model, mesh, recipe.machine, stage, step_rows(stage)[1])


def show(recipe: str, overrides: Sequence[str], world: int | None, stage: str | None, as_json: bool) -> None:
    """Print the plan of a stage (by default the first) as tables or as JSON."""
    loaded = load(recipe, list(overrides))
    model = countable_model(loaded)
    if model is None:
        raise UserError(
            f"{recipe}: a plan needs the sizes of the model, which this recipe does not tell; give [model] with "
            f"vocab_size."
        )
    planned = stage_named(loaded, stage)
    if planned.kind not in TRAINED:
        raise UserError(f"stage {planned.name!r} ({planned.kind}) does not train, so that its step costs nothing.")
    setup = setup_of(loaded, model, planned, world or assumed_world(loaded))
    if as_json:
        print(json.dumps(plain(setup), indent=2))
        return
    console = Console(highlight=False)
    for part in mesh_cost(setup):
        console.print(part)


def countable_model(recipe: Recipe) -> ModelSection | None:
    """The model that stages from "init" train, resolved; None where the recipe alone does not tell its size."""
    model = recipe.model
    size = tokenizer_size(recipe) or (model.vocab_size if model else 0)
    return model.resolved(size) if model is not None and model.module is None and size else None


def mesh_cost(setup: Setup) -> Iterator[RenderableType]:
    """The mesh in words, its tables and hints."""
    yield _mesh(setup)
    yield _memory(setup)
    busiest = max(range(setup.degrees.pp), key=lambda rank: sum(item.bytes for item in traffic(setup, rank)))
    sent = traffic(setup, busiest)
    if sent:
        yield _traffic(sent)
    if setup.degrees.pp > 1:
        yield _bubble(setup)
    yield from (f"hint        {hint}" for hint in hints(setup))
    yield BASIS


def plain(setup: Setup) -> dict[str, Any]:
    """The same as JSON has it, for every index of the pipeline axis."""
    schedule = setup.machine.pipeline.schedule
    ranks = [
        {
            "pipeline_rank": rank,
            "blocks": [[layers.start, layers.stop] for layers in (setup.layers[i] for i in setup.held(rank))],
            "memory_bytes": asdict(rank_memory(setup, rank)),
            "traffic": [asdict(item) for item in traffic(setup, rank)],
        }
        for rank in range(setup.degrees.pp)
    ]
    return {
        "degrees": asdict(setup.degrees),
        "precision": setup.precision,
        "microbatches": setup.microbatches,
        "bubble": bubble(schedule, setup.degrees.pp, setup.per_rank, setup.microbatches),
        "ranks": ranks,
        "hints": list(hints(setup)),
        "basis": BASIS,
    }


def hints(setup: Setup) -> Iterator[str]:
    """What is possible but wasteful."""
    d, pipeline = setup.degrees, setup.machine.pipeline
    idle = bubble(pipeline.schedule, d.pp, setup.per_rank, setup.microbatches)
    if setup.microbatches < d.pp:
        yield (
            f"{setup.microbatches} microbatches a step are fewer than the {d.pp} ranks of the pipeline, which are "
            f"idle {idle:.0%} of the time; smaller machine.microbatch_rows or more stages.{setup.stage.name}."
            f"batch_tokens give more of them."
        )
    if setup.filled < 1:
        yield (
            f"{1 - setup.filled:.0%} of the rows of a step are padding: {setup.rows} rows on {d.data_parallel} data "
            f"ranks do not fill {setup.microbatches} microbatches of {setup.machine.microbatch_rows} rows on each."
        )
    if setup.model.num_heads % d.tp:
        yield f"{setup.model.num_heads} heads are shared unevenly by tp = {d.tp}; the fullest rank sets the pace."


def processes_words(recipe: Recipe, world: int) -> str | None:
    """Where the job needs another number of processes than this recipe starts; None where it does not."""
    started = recipe.machine.processes
    if world == started:
        return None
    return f"The mesh is for {world:,} processes; `truestep run` alone starts {started} (machine.processes)."


def stage_named(recipe: Recipe, name: str | None) -> Stage:
    """A stage by its name; without one the first."""
    found = [stage for stage in recipe.stages if name in (None, stage.name)]
    if not found:
        names = ", ".join(stage.name for stage in recipe.stages)
        raise UserError(f"--stage {name!r} is not one of the recipe's stages; choose one of {names}.")
    return found[0]


def _mesh(setup: Setup) -> str:
    sizes = ", ".join(f"{axis} {size}" for axis, size in asdict(setup.degrees).items() if size > 1)
    shown = f"{setup.degrees.world:,} processes: {sizes}" if sizes else "one process"
    auto = ' (taken for "auto")' if setup.machine.precision == "auto" else ""
    return (
        f"mesh        {shown}; {setup.microbatches} microbatches of {setup.machine.microbatch_rows} rows a step on "
        f"each rank; {setup.precision}{auto}"
    )


def _memory(setup: Setup) -> Table:
    pp = setup.degrees.pp
    found = {rank: rank_memory(setup, rank) for rank in range(pp)}
    unit, size_of = _unit(max(memory.total for memory in found.values()))
    table = Table("pp" if pp > 1 else f"{unit} of a rank")
    kinds = [_SHORT.get(kind.name, kind.name) for kind in fields(RankMemory)]
    headings = ["blocks", "in flight"] if pp > 1 else []
    for heading in (*headings, *kinds, f"all {unit}" if pp > 1 else "all"):
        table.add_column(heading, justify="right")
    for rank in _shown(found):
        memory = found[rank]
        blocks = sum(len(setup.layers[i]) for i in setup.held(rank))
        about = [str(blocks), f"{setup.in_flight(rank):.4g}"] if pp > 1 else []
        sizes = [f"{size / size_of:,.2f}" for size in (*asdict(memory).values(), memory.total)]
        table.add_row(str(rank) if pp > 1 else "", *about, *sizes)
    modes = [mode for rank in found for mode in recomputation(setup, rank).values()]
    if setup.recompute is None:
        counts = ", ".join(f"{mode} {modes.count(mode)}" for mode in ("none", "selective", "full"))
        table.caption = f"activation_checkpointing = auto: blocks recomputed {counts}"
    return table


def _shown(found: dict[int, RankMemory]) -> list[int]:
    """All ranks of the pipeline axis, or of many the first, the fullest and the last ones."""
    if len(found) <= MOST_ROWS:
        return list(found)
    fullest = sorted(found, key=lambda rank: -found[rank].total)[: MOST_ROWS - 3]
    return sorted({0, 1, len(found) - 1, *fullest})


def _traffic(sent: list[Traffic]) -> Table:
    table = Table("axis", "sent in a step by the busiest rank")
    unit, size_of = _unit(max(item.bytes for item in sent))
    table.add_column("count", justify="right")
    table.add_column(unit, justify="right")
    for item in sent:
        table.add_row(item.axis, item.what, f"{item.count:,}", f"{item.bytes / size_of:,.2f}")
    return table


def _bubble(setup: Setup) -> str:
    schedule, pp = setup.machine.pipeline.schedule, setup.degrees.pp
    share = bubble(schedule, pp, setup.per_rank, setup.microbatches)
    return (
        f"bubble      {share:.1%} of a step with {schedule}: idle {FORMULAS[schedule]}; P = {pp}; F, B, W: times of a "
        f"pipeline stage ({setup.per_rank} a rank); B is the whole backward pass, 2 F, and W its half for the weights"
    )


def _unit(largest: int) -> tuple[str, int]:
    return ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
