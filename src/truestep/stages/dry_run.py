"""What a step costs one rank of a mesh of any size: the model is built and stepped by the code that trains, on tensors
that have shapes and no memory, in a job whose other ranks do not exist.

Found are the peak of live storages by kind, the collectives and the FLOPs of one step. Everything is computed as on a CPU
(see docs/guide/dry-run.md for what differs on CUDA).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Registers the backend "fake", whose collectives return at once and move nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

from truestep.models.build import build_model
from truestep.numerics.batch import Batch
from truestep.numerics.fake import fake_memory, fake_mode, fake_tensors
from truestep.numerics.tally import Collectives, Flops
from truestep.numerics.trace import Memory, Trace
from truestep.parallel.groups import Groups
from truestep.parallel.job import Job
from truestep.parallel.mesh import Limits, resolve
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.machine import Machine
from truestep.recipe.model import ModelSection
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import Stage
from truestep.train.build import HEAD_CHUNK_TOKENS, build
from truestep.train.state import TrainState
from truestep.train.step import train_step


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along one axis in a step: how many, and bytes (see numerics.tally.Collectives)."""

    kind: str
    axis: str
    count: int
    bytes: int


@dataclass(frozen=True)
class StepCost:
    """What one step costs one rank. `memory`: bytes by kind (numerics.trace.KINDS) at the moment of the peak.
    `parameters`: elements that this rank holds. FLOPs are counted by COUNTING_RULE."""

    parameters: int
    memory: dict[str, int]
    traffic: list[Traffic]
    forward_flops: int
    backward_flops: int
    recomputed_flops: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


def cost_of_step(
    build: Callable[[], TrainState],
    batches: Callable[[], list[Batch]],
    *,
    building: AbstractContextManager | None = None,
    stepping: AbstractContextManager | None = None,
    steps: int = 1,
) -> StepCost:
    """Build a state, take one step, and look at the `steps` after it, which find everything as all later ones do. The
    peak is that of the leanest: a backend's threads may hold on to what they sent a little longer, never shorter.
    `building` and `stepping` are the contexts of a dry run; without them the steps are real."""
    memory, flops = Memory(), Flops()
    with memory.resizing(), Trace(memory), building or nullcontext():
        state = build()
    collectives = Collectives(axis_names(state))
    with stepping or nullcontext(), memory.resizing(), Trace(memory, flops, collectives):
        peaks = []
        for _ in range(1 + steps):
            _hold(memory, state)
            given = batches()
            memory.begin()
            flops.begin()
            collectives.begin()
            train_step(state, given, sum(batch.labels_BT.numel() for batch in given), [])
            peaks.append(memory.peak())
    return StepCost(
        parameters=sum(parameter.numel() for parameter in state.parallel.locals().values()),
        memory=min(peaks[1:], key=lambda peak: sum(peak.values())),
        traffic=[Traffic(*key, count, collectives.bytes[key]) for key, count in sorted(collectives.count.items())],
        forward_flops=flops.forward,
        backward_flops=flops.backward,
        recomputed_flops=flops.recomputed,
    )


def _hold(memory: Memory, state: TrainState) -> None:
    """Say which storages are the parameters and the optimizer's (FSDP2 moves parameters at their first use)."""
    for parameter in state.parallel.bare.parameters():
        memory.hold(parameter, "parameters")
    for value in state.optimizer.named_state().values():
        memory.hold(value, "optimizer")


def axis_names(state: TrainState) -> Callable[[dist.ProcessGroup], str]:
    """From a process group to the axis that it runs along: "control" is the agreement of all ranks on a few numbers."""
    groups: Groups = state.parallel.groups
    names: dict[str, str] = {}
    for axis in (groups.axes.tp, groups.axes.cp, groups.axes.ep, groups.pp, groups.stage, groups.across, groups.world):
        if axis.group is not None:
            names[axis.group.group_name] = axis.name
    for mesh in (groups.dense, groups.expert):
        for dim in (mesh.mesh_dim_names or ()) if mesh is not None else ():
            names[mesh.get_group(dim).group_name] = _SHOWN.get(dim, dim)
    if state.job.control is not None:
        names[state.job.control.group_name] = "control"
    return lambda group: names.get(group.group_name, "other")


_SHOWN = {"dense": "dp_shard"}


@contextmanager
def fake_job(rank: int, world: int) -> Iterator[Job]:
    """This process as rank `rank` of a job of `world` whose other ranks do not exist; once a process."""
    device = torch.device("cpu")
    if world == 1:
        yield Job(0, 1, 0, 1, device, "none")
        return
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    control = dist.new_group(backend="fake")
    try:
        yield Job(rank, world, 0, 1, device, "none", control)  # pyright: ignore[reportArgumentType]
    finally:
        dist.destroy_process_group()


def whole_rows(rows: int, context: int, count: int) -> list[Batch]:
    """Microbatches of rows that hold one document each; all places but the last of a row have a target."""
    tokens_BT = torch.zeros(rows, context, dtype=torch.int64)
    positions_BT = torch.arange(context).repeat(rows, 1)
    return [Batch(tokens_BT, tokens_BT, positions_BT, None) for _ in range(count)]
