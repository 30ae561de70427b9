"""The one order in which a model is made parallel: activation checkpointing, compile, then the data axes.

A model is any module with `blocks` (the units of recomputation, compilation and sharding). Nothing here knows its kind.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from truestep.parallel.mesh import Degrees
from truestep.parallel.probe import NormProbe, ProbedReduceScatter, watch_leaves

_KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


@dataclass
class Parallel:
    """A model ready for the step. `call` is what the step runs; `bare` owns the parameters and their names."""

    bare: nn.Module
    call: nn.Module
    degrees: Degrees
    dtype: torch.dtype
    device: torch.device
    mesh: DeviceMesh | None = None
    probe: NormProbe = field(default_factory=NormProbe)

    @property
    def sharded(self) -> bool:
        return isinstance(self.bare, FSDPModule)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold whole copies as plain tensors (DDP); sharded tensors bring their own mesh."""
        return self.mesh["dp_replicate"].get_group() if self.mesh is not None and not self.sharded else None

    def compute(self) -> AbstractContextManager:
        """The precision that forward runs in: master weights stay as they are, products are of `dtype`."""
        if self.dtype in (torch.float32, torch.float64):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def microbatch(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of one microbatch. Only the last one of a step crosses the replicate axis."""
        if isinstance(self.call, FSDPModule):
            if self.degrees.dp_replicate > 1:
                self.call.set_requires_all_reduce(last)
            return nullcontext()
        if isinstance(self.call, DistributedDataParallel) and not last:
            return self.call.no_sync()
        return nullcontext()


def parallelize(
    model: nn.Module,
    degrees: Degrees,
    *,
    device: torch.device,
    dtype: torch.dtype,
    materialise: Callable[[nn.Module], None],
    activation_checkpointing: str = "none",
    compile_blocks: bool = False,
    reshard_after_forward: bool = True,
) -> Parallel:
    """Shard `model` (on the meta device), give it memory on `device` and fill it by `materialise(model)`.

    Gradients are *summed* over ranks (divisor 1): the step has divided each microbatch's loss by the weight of the
    whole global batch. Compute is in `dtype`; parameters, gradients and reductions stay at least fp32.
    """
    recompute(model.blocks, activation_checkpointing)  # pyright: ignore[reportArgumentType]
    if compile_blocks:
        for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            block.compile()
    if degrees.data_parallel == 1:
        model = _memory(model, device, materialise)
        result = Parallel(model, model, degrees, dtype, device)
        watch_leaves(model, result.probe)
        return result
    mesh = init_device_mesh(
        device.type, (degrees.dp_replicate, degrees.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    if degrees.dp_shard == 1:
        model = _memory(model, device, materialise)
        result = Parallel(model, _replicate(model, mesh), degrees, dtype, device, mesh)
        watch_leaves(model, result.probe)
        return result
    result = Parallel(model, model, degrees, dtype, device, mesh)
    _shard(model, mesh if degrees.dp_replicate > 1 else mesh["dp_shard"], dtype, reshard_after_forward, result.probe)
    _memory(model, device, materialise)
    return result


def recompute(blocks: Iterable[nn.Module], mode: str) -> None:
    """Recompute blocks in the backward pass. "selective" keeps the results of matrix products and redoes the rest."""
    if mode == "none":
        return
    options = {} if mode == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)}
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def _keep_products(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _memory(model: nn.Module, device: torch.device, materialise: Callable[[nn.Module], None]) -> nn.Module:
    model.to_empty(device=device)
    with torch.no_grad():
        materialise(model)
    return model


def _replicate(model: nn.Module, mesh: DeviceMesh) -> DistributedDataParallel:
    group = mesh["dp_replicate"].get_group()
    replicated = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    def add_up(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    replicated.register_comm_hook(None, add_up)  # pyright: ignore[reportArgumentType]
    return replicated


def _shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, reshard: bool, probe: NormProbe) -> None:
    low = dtype not in (torch.float32, torch.float64)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    comm = ProbedReduceScatter(probe)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            module.set_custom_reduce_scatter(comm)
