"""The one order in which a model is made parallel: parts of the pipeline, tensor and expert axes (parameters are cut),
activation checkpointing, compile, then the data axes.

A model is any module with `blocks` (the units of recomputation, compilation and sharding); one that can be split
further follows `Splittable`. Nothing here knows its kind.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from truestep.numerics.axis import Axes
from truestep.numerics.fused import require_symmetric_memory
from truestep.numerics.pieces import Piece, Split
from truestep.numerics.roles import Role
from truestep.parallel.experts import place_experts
from truestep.parallel.groups import Groups, make_groups
from truestep.parallel.layout import Place, cut, places
from truestep.parallel.model import MIRROR, Mirror, Parallel
from truestep.parallel.pipeline import Pipeline, Shape
from truestep.parallel.probe import watch_leaves
from truestep.parallel.recompute import recompute
from truestep.parallel.schedule import SPLIT_BACKWARD, rank_of_part
from truestep.parallel.shard_groups import watch_shards
from truestep.parallel.wire import Wire
from truestep.plan.split import stages_of_rank
from truestep.recipe.degrees import Degrees
from truestep.recipe.machine import Context

TABLE = "embed.weight"
"""Name of the table that a tied head uses too."""

Fill = Callable[[nn.Module, dict[str, Piece]], None]


@runtime_checkable
class Splittable(Protocol):
    """A model whose work can be split over the tensor, context and expert axes."""

    def place(self, axes: Axes) -> None: ...

    def splits(self) -> dict[str, Split]: ...


@runtime_checkable
class Divisible(Protocol):
    """A model that can be made into some of its layers. `backward_twice`: the backward passes of inputs and of weights
    will run apart."""

    backward_twice: bool

    def keep(self, layers: range, *, first: bool, last: bool) -> None: ...


@dataclass(frozen=True)
class PipelineSettings:
    """`layers` of each part; parts on a rank; hidden_size of what travels; whether the head is tied."""

    schedule: str
    per_rank: int
    layers: tuple[range, ...]
    hidden_size: int
    tied: bool


def parallelize(
    model: nn.Module,
    degrees: Degrees,
    *,
    device: torch.device,
    dtype: torch.dtype,
    fill: Fill,
    activation_checkpointing: str | Mapping[int, str] = "none",
    compile_blocks: bool = False,
    reshard_after_forward: bool = True,
    pipeline: PipelineSettings | None = None,
    context: Context | None = None,
    reduces_itself: bool = False,
    async_tp: bool = False,
    groups: Groups | None = None,
) -> Parallel:
    """Split and shard `model` (on the meta device), give it memory on `device` and have `fill(model, pieces)` fill the
    pieces of its parameters in place.

    Gradients are *summed* over ranks (divisor 1): the step has divided each microbatch's loss by the weight of the
    whole global batch. Compute is in `dtype`; parameters, gradients and reductions stay at least fp32. With
    `reduces_itself` replicas are sharded by FSDP2 too (over one rank each), whose reductions can be taken over; with
    `async_tp` products and collectives of the tensor axis are one (numerics.fused). `groups`: those of a model that is
    there already; by default new ones.
    """
    groups = groups or make_groups(degrees, device, context)
    if async_tp:
        require_symmetric_memory(groups.axes.tp, device)
        groups.axes.tp.fuses = groups.axes.tp.size > 1
    axes = {"tp": groups.axes.tp, "ep": groups.axes.ep}
    roles = model.roles()  # pyright: ignore[reportCallIssue]
    parts = {0: model} if degrees.pp == 1 else _cut_up(model, groups, pipeline)
    splits: dict[str, Split] = {}
    for part in parts.values():
        if isinstance(part, Splittable):
            part.place(groups.axes)
            place_experts(part, groups.axes.ep)
            splits |= part.splits()
    regions = {name: region for part in parts.values() for name, region in cut(part, splits, axes).items()}
    result = Parallel(list(parts.values()), model, groups, dtype, device)
    for part in parts.values():
        assert isinstance(part.blocks, nn.Module)
        recompute(part.blocks, activation_checkpointing, compile_blocks)
        if compile_blocks:
            for block in part.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                block.compile()
    experts = {name for name, split in splits.items() if split.axis == "ep"}
    replicates = degrees.by_ddp(experts=bool(experts), exact=reduces_itself)
    if replicates:
        whole = places(regions, splits, Groups(degrees), ()).items()  # DDP leaves nothing to be summed
        result.places = {name: Place(place.region, groups.world.rank == 0, place.missing) for name, place in whole}
    else:
        small = {name for name, region in regions.items() if name != MIRROR and is_small(roles[name], region.shape)}
        if degrees.by_fsdp(experts=bool(experts), exact=reduces_itself):
            for part in parts.values():
                keep = reshard_after_forward and degrees.pp == 1  # a pipeline gathers once a step
                _shard(part, groups, _policy(dtype, reduces_itself), keep, small, experts, result)
        result.places = places(regions, splits, groups, small)
    for part in parts.values():
        part.to_empty(device=device)
    pieces = result.pieces()
    with torch.no_grad():
        for part in parts.values():
            names = {name for name, _ in part.named_parameters()} | {name for name, _ in part.named_buffers()}
            fill(part, {name: piece for name, piece in pieces.items() if name in names})
    if replicates and any(parameter.requires_grad for parameter in model.parameters()):
        result.call = _replicate(model, groups, result.wire)
    if degrees.pp > 1:
        _lay_pipeline(result, parts, groups, pipeline)
    for part in parts.values():
        watch_leaves(part, result.probe)
    return result


def _cut_up(model: nn.Module, groups: Groups, settings: PipelineSettings | None) -> dict[int, nn.Module]:
    """This rank's parts of the pipeline, by their number."""
    assert isinstance(model, Divisible) and settings is not None
    numbers = stages_of_rank(settings.schedule, groups.pp.size, settings.per_rank, groups.pp.rank)
    parts = {}
    for number in numbers:
        parts[number] = part = deepcopy(model)
        part.keep(settings.layers[number], first=number == 0, last=number == len(settings.layers) - 1)
        part.backward_twice = settings.schedule in SPLIT_BACKWARD
    return parts


def _lay_pipeline(
    result: Parallel, parts: dict[int, nn.Module], groups: Groups, settings: PipelineSettings | None
) -> None:
    assert settings is not None
    shape = Shape(settings.hidden_size, groups.axes.tp.size, result.dtype)
    result.pipeline = Pipeline(parts, groups.pp, settings.schedule, settings.per_rank, shape, result.compute)
    if settings.tied:
        last = len(settings.layers) - 1
        rank_of = rank_of_part(settings.schedule, groups.pp.size, settings.per_rank)
        owner = parts[0].get_parameter(TABLE) if 0 in parts else None
        copy = parts[last].get_parameter(MIRROR) if last in parts else None
        result.mirror = Mirror(owner, copy, groups.pp, (rank_of(0), rank_of(last)))
        result.updated()


def is_small(role: Role, shape: tuple[int, ...]) -> bool:
    """Parameters that FSDP2 leaves alone: whole on every rank, and at least fp32 whatever the precision."""
    return len(shape) < 2 or shape[0] == 1 or role is Role.ROUTER


def _replicate(model: nn.Module, groups: Groups, wire: Wire) -> DistributedDataParallel:
    group = groups.world.group
    assert group is not None
    replicated = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    def add_up(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if wire.looks:  # at once, since what follows is a collective too
            given = buffer.clone()
            dist.all_reduce(buffer, group=group)
            wire.summed(buffer, given, group)
            done = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
            done.set_result(buffer)
            return done
        work = dist.all_reduce(buffer, group=group, async_op=True)
        assert work is not None

        def summed(done: torch.futures.Future) -> torch.Tensor:
            done.value()  # raises what went wrong; a backend that moves nothing has no value to give
            return buffer

        return work.get_future().then(summed)

    if dist.get_backend(group) != "fake":  # a dry run, which takes one step and compares with nobody
        _settle_buckets(replicated)
    replicated.register_comm_hook(None, add_up)  # pyright: ignore[reportArgumentType]
    return replicated


def _settle_buckets(replicated: DistributedDataParallel) -> None:
    """Let DDP choose its buckets now, from a backward pass that touches nothing. It would choose them anew after the
    first step of every attempt, by the order of gradients, and sums over three replicas or more depend on where in a
    bucket a gradient lies: a run that resumes would part in the last bits from one that goes on. Collective."""
    reducer = replicated.reducer  # private, but for it there is only the forward pass of the model
    parameters = [parameter for parameter in replicated.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        # Autograd begins with what was made last, so gradients come in the order of a real backward pass, or nearly.
        torch.stack([parameter.flatten()[:1].sum() * 0 for parameter in parameters]).sum().backward()
        reducer._rebuild_buckets()
    for parameter in parameters:
        parameter.grad = None


def _policy(dtype: torch.dtype, by_autocast: bool) -> MixedPrecisionPolicy:
    """Gathered weights in the dtype of the products, which halves what travels; or as they are, cast by autocast as on
    one device, where bits are to be the same."""
    low = dtype not in (torch.float32, torch.float64) and not by_autocast
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()


def _shard(
    model: nn.Module,
    groups: Groups,
    policy: MixedPrecisionPolicy,
    reshard: bool,
    small: set[str],
    experts: set[str],
    result: Parallel,
) -> None:
    parameters = dict(model.named_parameters())
    ignored = {parameters[name] for name in small if name in parameters}
    options = {"mp_policy": policy, "ignored_params": ignored}
    if experts:
        holders = {name.rpartition(".")[0] for name in experts if name in parameters}
        holders -= {one for one in holders for other in holders if one.startswith(f"{other}.")}  # adapters' are in them
        num_shards = groups.degrees.edp
        for holder in holders:
            fully_shard(
                model.get_submodule(holder),
                mesh=groups.expert,
                shard_placement_fn=partial(_expert_dim, num_shards),
                reshard_after_forward=reshard,
                **options,
            )
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(block, mesh=groups.dense, reshard_after_forward=reshard, **options)
    fully_shard(model, mesh=groups.dense, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    watch_shards(model, result.probe, result.wire)
    if result.device.type == "cuda":
        prefetch(model)


def prefetch(model: nn.Module) -> None:
    """Let the weights of a block be asked for before the block ahead of it computes. FSDP2 by itself asks when a block
    begins, which is in time only while the host runs ahead of the device: not where it reads something back, as for the
    sizes of experts' exchanges. (In the backward pass it looks ahead itself.)"""
    blocks = list(model.blocks)  # pyright: ignore[reportArgumentType]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([m for m in following.modules() if isinstance(m, FSDPModule)])


def _expert_dim(num_shards: int, parameter: nn.Parameter) -> Shard | None:
    """Stacked experts are cut along their inner dimension where there are too few of them and it divides."""
    fits = parameter.ndim == 3 and parameter.shape[0] % num_shards and parameter.shape[1] % num_shards == 0
    return Shard(1) if fits else None
