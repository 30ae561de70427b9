"""The dry run of a recipe: which ranks to look at, what their step consists of, and what it costs them."""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from truestep.data.packing import Column
from truestep.errors import UserError
from truestep.losses.preference import REFERENCE
from truestep.models import attention
from truestep.models.build import build_model
from truestep.numerics.fake import fake_memory, fake_mode, fake_tensors, fused_attention, replaced
from truestep.parallel.experts import place_experts
from truestep.parallel.mesh import Limits, resolve
from truestep.plan.split import stage_layers, stages_of_rank
from truestep.recipe.batch_schedule import step_rows
from truestep.recipe.degrees import Coordinate, Degrees
from truestep.recipe.machine import Machine
from truestep.recipe.model import ModelSection
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import Stage
from truestep.stages.corpora import supervision
from truestep.stages.dry_run import StepCost, costs_of_steps, fake_job, whole_rows
from truestep.stages.dry_run_scale import Series, carried_on, series_of_layers, series_of_microbatches
from truestep.train.build import HEAD_CHUNK_TOKENS, build
from truestep.train.state import TrainState

_STEPS = 1000
"""Of the stage: its number changes the learning rate, and no cost."""
_ON_CPU = {"device": "cpu", "async_tp": False, "offload_optimizer": False}
"""What a trace takes for the machine: it runs on no GPU, whatever the case is."""


@dataclass(frozen=True)
class Case:
    """One stage of a recipe on a mesh: everything that a trace needs. `device`: whose kernels and defaults hold."""

    model: ModelSection
    stage: Stage
    machine: Machine
    degrees: Degrees
    precision: str
    device: str

    @classmethod
    def of(cls, recipe: Recipe, model: ModelSection, stage: Stage, world: int) -> "Case":
        """`model` is resolved. Raises UserError for a mesh that cannot be. What "auto" would measure is what it finds
        on common hardware: bfloat16 on a GPU, float32 on a CPU."""
        given = recipe.machine
        degrees = resolve(given.mesh, world, Limits.of(recipe, model))
        device = "cpu" if given.device == "cpu" else "cuda"
        precision = given.precision
        if precision == "auto":
            precision = "bfloat16" if device == "cuda" else "float32"
        chunk = given.head_chunk_tokens or HEAD_CHUNK_TOKENS[device]
        machine = given.model_copy(update={"compile": False, "head_chunk_tokens": chunk})
        return cls(model, stage, machine, degrees, precision, device)

    @property
    def by_ddp(self) -> bool:
        """Whether DDP keeps the copies. Before its second step it compares with other ranks, so only one is taken."""
        return self.degrees.by_ddp(experts=self.model.moe is not None)

    @property
    def microbatches(self) -> int:
        """Microbatches of a rank in the largest step of the stage, as the loader shares them out."""
        _, rows = step_rows(self.stage)
        return -(-rows // (self.machine.microbatch_rows * self.degrees.data_parallel))

    def with_layers(self, num_layers: int) -> ModelSection:
        return self.model.model_copy(update={"num_layers": num_layers})


@dataclass(frozen=True)
class RankCost:
    """`traced`: what was traced, in words, where it was not everything."""

    rank: int
    place: Coordinate
    microbatches: int
    cost: StepCost
    traced: str = ""


def dry_run(case: Case, ranks: Sequence[int], processes: int = 1) -> list[RankCost]:
    """What a step costs each of `ranks`. Each trace is made in a process of its own, `processes` at a time."""
    for rank in ranks:
        if not 0 <= rank < case.degrees.world:
            raise UserError(f"rank {rank} is not one of {case.degrees.world}; choose 0 to {case.degrees.world - 1}.")
    layers = series_of_layers(case.model)
    if case.degrees.pp > 1 or case.machine.activation_checkpointing == "auto":  # what one block does hangs on all
        layers = Series([case.model.num_layers], 0)
    tasks = [(case, rank, size) for rank in ranks for size in layers.sizes]
    traced = dict(zip(((rank, size) for _, rank, size in tasks), _each_alone(_trace, tasks, processes)))
    found = []
    for rank in ranks:
        costs, said = zip(*(traced[rank, size] for size in layers.sizes))
        cost, words = carried_on(costs, layers.further), list(said[-1:])
        if cost is None:
            (whole,) = _each_alone(_trace, [(case, rank, case.model.num_layers)], 1)
            cost, words = whole[0], [whole[1]]
        elif layers.saves:
            words.append(f"{layers.sizes} of {case.model.num_layers} layers")
        place = case.degrees.coordinate(rank)
        if case.machine.offload_optimizer:  # all of its state is there all the time, whenever the peak is
            cost = replace(cost, memory=cost.memory | {"optimizer": 0})
        found.append(RankCost(rank, place, case.microbatches, cost, " and ".join(word for word in words if word)))
    return found


def telling_ranks(case: Case) -> list[int]:
    """The first rank of each pipeline stage that may need most memory: of those that hold equally many layers, the
    first one, which has most microbatches in flight, and those with the embedding and the head."""
    degrees, pipeline = case.degrees, case.machine.pipeline
    per_stage = degrees.world // degrees.pp
    layers = stage_layers(case.model, pipeline, degrees.pp, case.stage.context)
    seen: dict[tuple[int, bool, bool], int] = {}
    for place in range(degrees.pp):
        held = stages_of_rank(pipeline.schedule, degrees.pp, len(layers) // degrees.pp, place)
        key = sum(len(layers[stage]) for stage in held), 0 in held, len(layers) - 1 in held
        seen.setdefault(key, place * per_stage)
    return sorted(seen.values())


def _trace(case: Case, rank: int, num_layers: int) -> tuple[StepCost, str]:
    """A step of one rank of a model with so many layers, and in words what was traced of its microbatches."""
    torch.set_num_threads(1)
    mode, model, degrees = fake_mode(), case.with_layers(num_layers), case.degrees
    count = case.microbatches
    series = series_of_microbatches(count, case.machine.pipeline, degrees.pp)
    if case.by_ddp:
        series = Series([count], 0)
    rows = partial(whole_rows, case.machine.microbatch_rows, case.stage.context, columns=columns_of(case.stage))
    on_cuda = case.device == "cuda"
    attend = fused_attention if on_cuda else attention.scaled_dot_product_attention
    with fake_job(rank, degrees.world) as here, replaced(attention, "scaled_dot_product_attention", attend):

        def make() -> TrainState:
            state = build(
                case.stage,
                build_model(model, model.vocab_size),
                lambda model, pieces: None,
                job=here,
                machine=case.machine.model_copy(update=_ON_CPU),
                precision=case.precision,
                seed=0,
                steps=_STEPS,
            )
            for part in state.parallel.parts:
                place_experts(part, state.parallel.groups.axes.ep, forced_balance=True)
            return state

        def costs(counts: Sequence[int]) -> list[StepCost]:
            return costs_of_steps(
                make,
                None if case.by_ddp else partial(rows, 1),
                [partial(rows, number) for number in counts],
                building=fake_memory(mode),
                stepping=fake_tensors(mode, on_cuda),
            )

        cost = carried_on(costs(series.sizes), series.further)
        if cost is None:
            return costs([count])[0], ""
    return cost, f"{series.sizes} of {count} microbatches" if series.saves else ""


def columns_of(stage: Stage) -> dict[str, Column]:
    """Of the rows that the loss of a stage looks at; what models beside it would add is taken to be stored."""
    if stage.kind == "pretrain":
        return {}
    stored = {REFERENCE: Column(np.dtype("float32"))} if stage.kind == "preference" else {}
    return dict(supervision(stage).columns) | stored


def _each_alone(work: Callable[..., Any], tasks: Sequence[tuple], processes: int) -> list[Any]:
    """work(*task) of every task, each in a forked process that does nothing else: a process can join one job only."""
    torch.set_num_threads(1)  # a forked pool of OpenMP threads may hang
    with multiprocessing.get_context("fork").Pool(min(processes, len(tasks)), maxtasksperchild=1) as pool:
        return pool.starmap(work, tasks, chunksize=1)
