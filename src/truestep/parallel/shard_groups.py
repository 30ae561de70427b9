"""FSDP2's groups of parameters, which it gathers and reduces together, and the collectives of ours that it calls.

2.11 and 2.13 name the private parts alike, but for the attribute that leads to the groups.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from truestep.numerics.axis import all_gather, reduce_scatter
from truestep.parallel.probe import GradientProbe
from truestep.parallel.wire import Wire


def param_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # 2.13
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def registered(param: FSDPParam) -> nn.Parameter:
    """The parameter as its module has it; `sharded_param` lags behind `to_empty` until first use."""
    return getattr(param._module_info.module, param._module_info.param_name)


def watch_shards(model: nn.Module, probe: GradientProbe, wire: Wire) -> None:
    """Let FSDP2 call our collectives, which are looked at on both sides."""
    paths = {id(module): f"{path}." if path else "" for path, module in model.named_modules()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module):
                names = [paths[id(p._module_info.module)] + p._module_info.param_name for p in group.fsdp_params]
                group._all_gather_comm = _AllGather(wire)
                group._reduce_scatter_comm = _ReduceScatter(probe, wire, group, names)


class _Comm:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm, AllGather):
    """FSDP2's default all-gather, waited for where it is looked at."""

    def __init__(self, wire: Wire):
        self._wire = wire

    def __call__(self, output_tensor, input_tensor, group, async_op: bool = False):
        work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op and not self._wire.looks)
        if self._wire.looks:
            self._wire.gathered(output_tensor, input_tensor, group)
        return work


class _ReduceScatter(_Comm, ReduceScatter):
    """FSDP2's default reduce-scatter, with its input noted (the padding of uneven shards is zero)."""

    def __init__(self, probe: GradientProbe, wire: Wire, group: FSDPParamGroup, names: list[str]):
        self._probe, self._wire, self._group, self._names = probe, wire, group, names

    def __call__(self, output_tensor, input_tensor, group, op: Any, async_op: bool = False):
        self._probe.add(input_tensor, lambda: self._columns(input_tensor, group))
        work = reduce_scatter(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op and not self._wire.looks
        )
        if self._wire.looks:
            self._wire.scattered(output_tensor, input_tensor, group)
        return work

    def _columns(self, input_N: torch.Tensor, group: dist.ProcessGroup) -> Iterable[tuple[str, torch.Tensor]]:
        widths = {
            name: param.padded_sharded_param_size.numel()
            for name, param in zip(self._names, self._group.fsdp_params)
            if param.sharded_param.requires_grad
        }
        return columns(widths, input_N.view(group.size(), -1))


def columns(widths: dict[str, int], x_WN: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters in what FSDP2 lays out for a reduction, each of its width; all as one where some made no
    gradient."""
    if sum(widths.values()) != x_WN.shape[1]:
        yield " ".join(widths), x_WN
        return
    start = 0
    for name, width in widths.items():
        yield name, x_WN[:, start : start + width]
        start += width
