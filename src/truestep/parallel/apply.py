"""The one order in which a model is made parallel: parts of the pipeline, tensor and expert axes (parameters are cut),
activation checkpointing, compile, then the data axes.

A model is any module with `blocks` (the units of recomputation, compilation and sharding); one that can be split
further follows `Splittable`. Nothing here knows its kind.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from truestep.numerics.axis import Axes
from truestep.numerics.pieces import Piece, Split
from truestep.numerics.roles import Role
from truestep.parallel.groups import Groups, make_groups
from truestep.parallel.layout import Place, cut, places
from truestep.parallel.model import Parallel
from truestep.parallel.probe import ProbedReduceScatter, watch_leaves
from truestep.recipe.degrees import Degrees

_KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}

Fill = Callable[[nn.Module, dict[str, Piece]], None]


@runtime_checkable
class Splittable(Protocol):
    """A model whose work can be split over the tensor, context and expert axes."""

    def place(self, axes: Axes) -> None: ...

    def splits(self) -> dict[str, Split]: ...


def parallelize(
    model: nn.Module,
    degrees: Degrees,
    *,
    device: torch.device,
    dtype: torch.dtype,
    fill: Fill,
    activation_checkpointing: str = "none",
    compile_blocks: bool = False,
    reshard_after_forward: bool = True,
) -> Parallel:
    """Split and shard `model` (on the meta device), give it memory on `device` and have `fill(model, pieces)` fill the
    pieces of its parameters in place.

    Gradients are *summed* over ranks (divisor 1): the step has divided each microbatch's loss by the weight of the
    whole global batch. Compute is in `dtype`; parameters, gradients and reductions stay at least fp32.
    """
    groups = make_groups(degrees, device)
    splits: dict[str, Split] = {}
    if isinstance(model, Splittable):
        model.place(groups.axes)
        splits = model.splits()
    axes = {"tp": groups.axes.tp, "ep": groups.axes.ep}
    regions = cut(model, splits, axes)
    roles = model.roles()  # pyright: ignore[reportCallIssue]
    recompute(model.blocks, activation_checkpointing)  # pyright: ignore[reportArgumentType]
    if compile_blocks:
        for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            block.compile()
    result = Parallel(model, model, groups, dtype, device)
    experts = {name for name, split in splits.items() if split.axis == "ep"}
    replicates = degrees.dp_replicate == degrees.world > 1 and not experts
    if replicates:
        whole = Groups(degrees)  # DDP leaves nothing to be summed
        result.places = {
            name: Place(place.region, groups.world.rank == 0, place.missing)
            for name, place in places(regions, splits, whole, ()).items()
        }
    else:
        small = {name for name in regions if is_small(roles[name], regions[name].shape)}
        shards = degrees.dense_shard * degrees.dp_replicate > 1 or bool(experts and degrees.edp > 1)
        if shards:
            _shard(model, groups, dtype, reshard_after_forward, small, experts, result)
        result.places = places(regions, splits, groups, small)
    model.to_empty(device=device)
    with torch.no_grad():
        fill(model, result.pieces())
    if replicates:
        result.call = _replicate(model, groups)
    watch_leaves(model, result.probe)
    return result


def is_small(role: Role, shape: tuple[int, ...]) -> bool:
    """Parameters that FSDP2 leaves alone: whole on every rank, and at least fp32 whatever the precision."""
    return len(shape) < 2 or role is Role.ROUTER


def recompute(blocks: Iterable[nn.Module], mode: str) -> None:
    """Recompute blocks in the backward pass. "selective" keeps the results of matrix products and redoes the rest."""
    if mode == "none":
        return
    options = {} if mode == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)}
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def _keep_products(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _replicate(model: nn.Module, groups: Groups) -> DistributedDataParallel:
    group = groups.world.group
    replicated = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    def add_up(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        work = dist.all_reduce(buffer, group=group, async_op=True)
        assert work is not None

        def summed(done: torch.futures.Future) -> torch.Tensor:
            done.value()  # raises what went wrong; a backend that moves nothing has no value to give
            return buffer

        return work.get_future().then(summed)

    replicated.register_comm_hook(None, add_up)  # pyright: ignore[reportArgumentType]
    return replicated


def _shard(
    model: nn.Module,
    groups: Groups,
    dtype: torch.dtype,
    reshard: bool,
    small: set[str],
    experts: set[str],
    result: Parallel,
) -> None:
    low = dtype not in (torch.float32, torch.float64)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    parameters = dict(model.named_parameters())
    ignored = {parameters[name] for name in small}
    options = {"mp_policy": policy, "ignored_params": ignored}
    if experts:
        holders = {name.rpartition(".")[0] for name in experts}
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
    comm = ProbedReduceScatter(result.probe)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            module.set_custom_reduce_scatter(comm)


def _expert_dim(num_shards: int, parameter: nn.Parameter) -> Shard | None:
    """Stacked experts are cut along their inner dimension where there are too few of them and it divides."""
    fits = parameter.ndim == 3 and parameter.shape[0] % num_shards and parameter.shape[1] % num_shards == 0
    return Shard(1) if fits else None
