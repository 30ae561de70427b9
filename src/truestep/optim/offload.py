"""Optimizer state that lies in the host's memory and visits the device for the update, a bucket at a time.

Parameters, gradients and the update stay on the device, so that its numbers are those of an update without offloading,
with AdamW to the bit. The other way, gradients to the host and the update there, moves 8 bytes a parameter where this
moves 16, but half of these go in each direction at the same time, and the host's memory, which all devices of a machine
share, need not take an update of its own. While one bucket is updated, the next comes and the one before goes.

On the device there is place for two buckets, which take turns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from truestep.optim.groups import Group, Named
from truestep.optim.named import NamedOptimizer

BUCKET_ELEMENTS = 2**26
"""Of the parameters of a bucket, about: half a GiB of AdamW's state. A larger parameter is a bucket by itself."""
_ALIGNED = 256

State = dict[torch.Tensor, dict[str, torch.Tensor]]


def bucketed(groups: Sequence[Group], elements_of: Callable[[Named], int], limit: int) -> Iterator[list[Group]]:
    """Parts of the groups, in their order, with parameters of at most `limit` elements each, or with a single one."""
    for group in groups:
        bucket: list[Named] = []
        filled = 0
        for named in group.params:
            elements = elements_of(named)
            if bucket and filled + elements > limit:
                yield [replace(group, params=bucket)]
                bucket, filled = [], 0
            bucket.append(named)
            filled += elements
        yield [replace(group, params=bucket)]


@dataclass
class Bucket:
    """`part` updates some parameters. Its state lies in the bytes of `host`; `at_rest` are the tensors in there."""

    part: torch.optim.Optimizer
    host: torch.Tensor
    at_rest: State

    def visiting(self, space: torch.Tensor) -> State:
        """The same tensors, in the bytes of `space` on the device."""
        return _views(self.at_rest, space)


def at_rest(part: torch.optim.Optimizer) -> Bucket:
    """Move the state of an optimizer, plain tensors all of them, to the host: pinned, where it comes from a GPU."""
    state: State = {param: dict(kept) for param, kept in part.state.items()}
    pinned = any(value.is_cuda for kept in state.values() for value in kept.values())
    size = sum(_room(value) for kept in state.values() for value in kept.values())
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    views = _views(state, host)
    for param, kept in state.items():
        for key, value in kept.items():
            views[param][key].copy_(value)
    part.state.update(views)
    return Bucket(part, host, views)


class Offloaded(NamedOptimizer):
    """`buckets` hold the state of everything in `groups`. Its tensors lie in the host's memory whenever this is not in
    `step`, for checkpoints and all others."""

    def __init__(self, groups: Sequence[Group], buckets: Sequence[Bucket]):
        super().__init__(groups, [bucket.part for bucket in buckets])
        self.buckets, self.device = list(buckets), groups[0].params[0][1].device
        self._module: Any = torch.get_device_module(self.device)
        self._coming, self._going = self._module.Stream(), self._module.Stream()

    @torch.no_grad()
    def step(self) -> None:
        largest = max(bucket.host.numel() for bucket in self.buckets)
        now, count = self._module.current_stream(), len(self.buckets)
        spaces = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(min(2, count))]
        self._coming.wait_stream(now)  # the memory of the spaces is free once what is queued is done
        came = self._fetch(self.buckets[0], spaces[0])
        gone = None
        for index, bucket in enumerate(self.buckets):
            space = spaces[index % 2]
            now.wait_event(came)
            if index + 1 < count:
                if gone is not None:  # the next one's place is that of the one before
                    self._coming.wait_event(gone)
                came = self._fetch(self.buckets[index + 1], spaces[(index + 1) % 2])
            bucket.part.state.update(bucket.visiting(space))
            bucket.part.step()
            bucket.part.state.update(bucket.at_rest)
            gone = self._give_back(bucket, space, now.record_event())
        now.wait_stream(self._going)  # whoever gets the memory of the spaces next

    def state_by_param(self) -> dict[str, dict[str, torch.Tensor]]:
        """As of any optimizer; what the last step changed has arrived."""
        if self.device.type == "cuda":
            self._going.synchronize()
        return super().state_by_param()

    def _fetch(self, bucket: Bucket, space: torch.Tensor) -> Any:
        """Copy a bucket in; the event that it is there."""
        with self._module.stream(self._coming):
            space[: bucket.host.numel()].copy_(bucket.host, non_blocking=True)
            return self._coming.record_event()

    def _give_back(self, bucket: Bucket, space: torch.Tensor, updated: Any) -> Any:
        """Copy a bucket out once it is updated; the event that it has gone."""
        self._going.wait_event(updated)
        with self._module.stream(self._going):
            bucket.host.copy_(space[: bucket.host.numel()], non_blocking=True)
            return self._going.record_event()


def _room(value: torch.Tensor) -> int:
    """Bytes of a tensor, up to where the next one may begin: fused updates want aligned ones."""
    return -(-value.nbytes // _ALIGNED) * _ALIGNED


def _views(state: State, space: torch.Tensor) -> State:
    """Tensors like those of `state`, one after another in the bytes of `space`."""
    views: State = {}
    begin = 0
    for param, kept in state.items():
        views[param] = {}
        for key, value in kept.items():
            part = space[begin : begin + value.nbytes].view(value.dtype)
            views[param][key] = part.view(value.shape)
            begin += _room(value)
    return views
