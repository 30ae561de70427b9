"""What a step costs one rank of a mesh of any size: the model is built and stepped by the code that trains, on tensors
that have shapes and no memory, in a job whose other ranks do not exist.

Found are the peak of live storages by kind, the collectives and the FLOPs of one step. Everything is computed as on a
CPU (docs/guide/dry-run.md says what differs on CUDA).
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Registers the backend "fake", whose collectives return at once and move nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

from truestep.data.packing import NO_COLUMNS, Column
from truestep.numerics.batch import Batch
from truestep.numerics.tally import Collectives, Flops
from truestep.numerics.trace import Memory, Trace
from truestep.parallel.groups import Groups
from truestep.parallel.job import Job
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
    """What one step costs one rank. `parameters`: elements that it holds. `memory`: bytes by kind
    (numerics.trace.KINDS) at the moment when most were live. `flops`: forward, backward, recomputed, by COUNTING_RULE.
    """

    parameters: int
    memory: dict[str, int]
    traffic: list[Traffic]
    flops: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())


def costs_of_steps(
    build: Callable[[], TrainState],
    warm_up: Callable[[], list[Batch]] | None,
    steps: Sequence[Callable[[], list[Batch]]],
    *,
    building: AbstractContextManager | None = None,
    stepping: AbstractContextManager | None = None,
) -> list[StepCost]:
    """Build a state and take `steps`, each given as what makes this rank's microbatches, after one to warm up where
    there is one: later ones find everything as all others do. `building` and `stepping` are the contexts of a dry run;
    without them the steps are real."""
    memory, flops = Memory(), Flops()
    with memory.resizing(), Trace(memory), building or nullcontext():
        state = build()
    collectives = Collectives(axis_names(state))
    costs = []
    with stepping or nullcontext(), memory.resizing(), Trace(memory, flops, collectives):
        for make in (*([warm_up] if warm_up else []), *steps):
            _hold(memory, state)
            batches = make()
            gc.collect()  # what the last step left behind in cycles is not of this one
            for observer in (memory, flops, collectives):
                observer.begin()
            train_step(state, batches, sum(batch.labels_BT.numel() for batch in batches), [])
            costs.append(_cost(state, memory, flops, collectives))
    return costs[-len(steps) :]


def _hold(memory: Memory, state: TrainState) -> None:
    """Say which storages are the parameters and the optimizer's (FSDP2 moves parameters at their first use)."""
    for parameter in state.parallel.locals().values():
        memory.hold(parameter, "parameters")
    for value in state.optimizer.named_state().values():
        memory.hold(value, "optimizer")


def _cost(state: TrainState, memory: Memory, flops: Flops, collectives: Collectives) -> StepCost:
    return StepCost(
        parameters=sum(parameter.numel() for parameter in state.parallel.locals().values()),
        memory=memory.peak(),
        traffic=[Traffic(*key, count, collectives.bytes[key]) for key, count in sorted(collectives.count.items())],
        flops={"forward": flops.forward, "backward": flops.backward, "recomputed": flops.recomputed},
    )


def axis_names(state: TrainState) -> Callable[[dist.ProcessGroup], str]:
    """From a process group to the axis that it runs along; "dp_shard/ep" where the same ranks form both. "stage": all
    ranks of a pipeline stage; "across": those of them with the same part of tensor-split weights; "control": the
    agreement of all ranks on a few numbers."""
    groups: Groups = state.parallel.groups
    shard = "dp_shard" if groups.degrees.cp == 1 else "dp_shard, cp"
    axes = [(axis.name, axis.group) for axis in (groups.pp, groups.axes.cp, groups.axes.tp)]
    axes += [*_dims(groups.dense, {"dense": shard}), ("ep", groups.axes.ep.group)]
    axes += _dims(groups.expert, {}) if groups.degrees.ep > 1 else []
    names: dict[str, str] = {}
    for name, group in axes:
        if group is not None and name not in names.get(group.group_name, "").split("/"):
            names[group.group_name] = "/".join(filter(None, (names.get(group.group_name), name)))
    wider = [(axis.name, axis.group) for axis in (groups.across, groups.stage, groups.world)]
    for name, group in (*wider, ("control", state.job.control)):
        if group is not None:
            names.setdefault(group.group_name, name)
    return lambda group: names.get(group.group_name, "other")


def _dims(mesh: DeviceMesh | None, shown: Mapping[str, str]) -> list[tuple[str, dist.ProcessGroup | None]]:
    if mesh is None or mesh.size() == 1:
        return []
    return [(shown.get(dim, dim), mesh.get_group(dim)) for dim in mesh.mesh_dim_names or ()]


@contextmanager
def fake_job(rank: int, world: int) -> Iterator[Job]:
    """This process as rank `rank` of a job of `world` whose other ranks do not exist; once a process."""
    device = torch.device("cpu")
    if world == 1:
        yield Job(0, 1, 0, 1, device, "none")
        return
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    control = dist.new_group(backend="fake")
    with _agreement():
        try:
            yield Job(rank, world, 0, 1, device, "none", control)  # pyright: ignore[reportArgumentType]
        finally:
            dist.destroy_process_group()


@contextmanager
def _agreement() -> Iterator[None]:
    """Objects, which ranks tell each other in words, cannot come from ranks that do not exist: as long as this lasts,
    all of them say what this one does."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    originals = dist.all_gather_object, dist.broadcast_object_list
    dist.all_gather_object, dist.broadcast_object_list = all_gather_object, lambda *_, **__: None
    try:
        yield
    finally:
        dist.all_gather_object, dist.broadcast_object_list = originals


def whole_rows(rows: int, context: int, count: int, columns: Mapping[str, Column] = NO_COLUMNS) -> list[Batch]:
    """Microbatches of rows that hold one document each; all places but the last of a row have a target. Columns hold
    ones."""
    tokens_BT = torch.zeros(rows, context, dtype=torch.int64)
    positions_BT = torch.arange(context).repeat(rows, 1)
    ones = {name: torch.from_numpy(np.ones((rows, context, *one.shape), one.dtype)) for name, one in columns.items()}
    return [Batch(tokens_BT, tokens_BT, positions_BT, None, ones) for _ in range(count)]
