"""FSDP2 under exact reduction: its reduce-scatter is ours, and no gradient is ever summed in floating point.

The buffer that FSDP2 would reduce-scatter is exchanged as it is; each rank rounds what it was given for its own shard,
and adds the integers up. That is the traffic of a reduce-scatter in the same dtype, though every sum is one of int64.

All uses of torch's private API are in this file and in shard_groups.py: FSDPParamGroup, its parameters in the order of
that buffer, its process group and its stream. 2.11 and 2.13 name them alike.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from truestep.numerics.exact_collectives import exchange_rows
from truestep.parallel.exact import Exact
from truestep.parallel.exact_bucket import Bucket, Route, Scales, Slot, lay_out
from truestep.parallel.shard_groups import columns, param_groups, registered


def shard_exactly(
    exact: Exact,
    model: nn.Module,
    route: Callable[[str], Route],
    *,
    once_a_step: bool = False,
) -> None:
    """Take over the gradient reduction of every FSDP module of `model`, whose parameters have memory by now.

    `route`: for a parameter's name, what follows the reduction over its shards; with HSDP that is the replicate axis,
    since FSDP2's own all-reduce is switched off here. `once_a_step` is for pipeline stages, which keep their parameters
    whole over the microbatches of a step: see `StageBucket`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_requires_all_reduce(False, recurse=False)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        for group in param_groups(module):
            single = group._reduce_scatter_process_group.size() == 1
            if single:  # FSDP2 calls no reduce-scatter then
                module.set_requires_gradient_sync(False, recurse=False)
            present = {id(registered(param)): param for param in group.fsdp_params}
            named = {names[key]: param for key, param in present.items() if key in names}
            if named:
                kind = StageBucket if once_a_step or single else ShardBucket
                exact.include(kind(exact.scales, group, named, route))


class ShardBucket(Bucket):
    """Shards of the parameters that FSDP2 reduces together, exchanged after the backward pass of each microbatch."""

    def __init__(
        self, scales: Scales, group: FSDPParamGroup, params: dict[str, FSDPParam], route: Callable[[str], Route]
    ):
        self._fsdp_group, self._fsdp_params = group, params
        widths = {name: param.padded_sharded_param_size.numel() for name, param in params.items()}
        super().__init__(scales, lay_out(scales, widths, route))
        self._dropping = False
        group._reduce_scatter_comm = _ExactReduceScatter(self)

    @property
    def world(self) -> int:
        return self._fsdp_group._reduce_scatter_process_group.size()

    def parameter(self, slot: Slot) -> nn.Parameter:
        return self._fsdp_params[slot.name].sharded_param

    def reduce(self, input_N: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Round and add what FSDP2 laid out for a reduce-scatter: for each rank its shards, one after the other."""
        if input_N.numel() != self.world * self.width:
            names = ", ".join(slot.name for slot in self.slots)
            raise RuntimeError(
                f"a backward pass made gradients of only some of {names}; under exact reduction every trainable "
                "parameter that FSDP2 reduces together takes part in every microbatch"
            )
        self._drop_float_gradients()
        self.scales.probe.add(input_N, lambda: self._columns(input_N))
        self._receive(self.slots, input_N.view(self.world, -1), group)

    def take(self, slot: Slot, grad: torch.Tensor) -> None:
        """Reduce the whole gradient of a further use; a collective in the midst of the backward pass."""
        if self._fsdp_params[slot.name].fsdp_placement.dim != 0:
            raise RuntimeError(f"{slot.name} is not sharded by rows, so it can be used only once in a microbatch")
        group = self._fsdp_group
        handle: Any = group.device_handle  # torch.cpu or torch.cuda
        stream = group.comm_ctx.reduce_scatter_stream
        stream.wait_stream(handle.current_stream())
        with handle.stream(stream):
            padded_WN = _pad_rows(grad, self.world, slot.width)
            self._receive([slot], padded_WN, group._reduce_scatter_process_group)
        if grad.is_cuda:
            grad.record_stream(stream)

    def complete(self) -> None:
        self._fsdp_group._partial_reduce_output = None  # of HSDP: the empty results that FSDP2 adds up
        super().complete()

    def _receive(self, slots: list[Slot], x_WN: torch.Tensor, group: dist.ProcessGroup) -> None:
        received_WN, residual = exchange_rows(x_WN, group, self.scales.trail)
        self.scales.residual += residual
        first = slots[0].start
        for slot in slots:
            columns = slice(slot.start - first, slot.start - first + slot.width)
            self.scales.add(slot, self.part(slot), received_WN[:, columns])

    def _columns(self, input_N: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return columns({slot.name: slot.width for slot in self.slots}, input_N.view(self.world, -1))

    def _drop_float_gradients(self) -> None:
        """FSDP2 makes the (zero) output of a reduction the `.grad`, which goes at once: `fill` sets the real one."""
        if not self._dropping:
            for slot in self.slots:
                self.parameter(slot).register_post_accumulate_grad_hook(_drop)
            self._dropping = True


class StageBucket(ShardBucket):
    """Parameters of a pipeline stage that FSDP2 reduces together. They stay whole over the microbatches of a step, and
    so do the integers, which are exchanged once. Gradients are taken by `sweep`."""

    def begin(self) -> None:
        device, world = self.scales.device, self.world
        if world == 1:  # the shard is the whole
            super().begin()
            self._wholes = [self.part(slot) for slot in self.slots]
        else:
            self._wholes = [torch.zeros(world * slot.width, dtype=torch.int64, device=device) for slot in self.slots]

    def take(self, slot: Slot, grad: torch.Tensor) -> None:
        whole_N = self._wholes[self.slots.index(slot)]
        self.scales.add(slot, whole_N[: grad.numel()], grad.reshape(1, -1))

    def sweep(self) -> None:
        for slot, param in zip(self.slots, self._fsdp_params.values()):
            for grad in _take_whole_gradients(param):
                self.scales.probe.add(grad, lambda slot=slot, grad=grad: [(slot.name, grad)])
                self.take(slot, grad)

    def complete(self) -> None:
        if self.world > 1:
            self._exchange()
        self._wholes = []
        super().complete()

    def drop(self) -> None:
        self._wholes = []
        super().drop()

    def _exchange(self) -> None:
        super().begin()
        group = self._fsdp_group._reduce_scatter_process_group
        for index, slot in enumerate(self.slots):
            received_WN, residual = exchange_rows(self._wholes[index].view(self.world, -1), group, self.scales.trail)
            self._wholes[index] = received_WN[:0]  # given up before the next one
            self.scales.residual += residual
            torch.sum(received_WN, dim=0, out=self.part(slot))


class _ExactReduceScatter(ReduceScatter):
    """What FSDP2 calls instead of a reduce-scatter. Its output stays zero."""

    def __init__(self, bucket: ShardBucket):
        self._bucket = bucket

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        is_output = size[0] == self._bucket.width
        return (torch.zeros if is_output else torch.empty)(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op: Any, async_op: bool = False) -> None:
        self._bucket.reduce(input_tensor, group)


def _take_whole_gradients(param: FSDPParam) -> list[torch.Tensor]:
    """The gradients of the unsharded parameter: autograd's, or FSDP2's copy of it in the dtype of reduction."""
    if not hasattr(param, "_unsharded_param"):
        return []
    found = [grad for grad in (param.unsharded_accumulated_grad, param.unsharded_param.grad) if grad is not None]
    param.unsharded_accumulated_grad = param.unsharded_param.grad = None
    return found


def _pad_rows(grad: torch.Tensor, world: int, width: int) -> torch.Tensor:
    """A whole gradient as `torch.chunk` shares out its dim 0: `world` rows of `width` elements, zeros at the end."""
    flat = grad.detach().reshape(-1)
    missing = world * width - flat.numel()
    return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(world, width)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None
