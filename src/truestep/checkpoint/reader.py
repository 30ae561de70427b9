"""DCP's StorageReader over our stores: fetches whole blocks, only those that are needed, and verifies each.

`fetch` reads everything this rank needs into host buffers and checks it; `apply` copies it into the targets. So no
target changes unless every byte is right, at the price of one copy of the local state in host memory - the size of an
asynchronous save's staging buffers, which the same host has to hold anyway.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from truestep.checkpoint.codec import dtype_of, metadata_of
from truestep.checkpoint.manifest import Chunk, Manifest, block_digest
from truestep.checkpoint.places import read_checked
from truestep.checkpoint.staging import host_bytes
from truestep.numerics.digest import raw_bytes
from truestep.storage.interface import Store

BUFFER_BYTES = 256 << 20


@dataclass
class _Want:
    """The part of a chunk that one read item needs: blocks [first, stop)."""

    item: ReadItem
    name: str
    chunk: Chunk
    dtype: torch.dtype
    first: int
    stop: int

    @property
    def span(self) -> tuple[int, int]:
        """Byte range within the object, on block borders."""
        return self.chunk.block_range(self.first)[0], self.chunk.block_range(self.stop - 1)[1]


@dataclass
class _Buffer:
    """A contiguous range of an object, and the wants that lie in it."""

    object: str
    start: int
    stop: int
    wants: list[_Want]
    data: torch.Tensor | None = None


_Request = tuple[_Buffer, list[tuple[_Want, int]]]


class BlockReader(StorageReader):
    """Reads one committed checkpoint. `bytes_read` counts what was asked of the store."""

    def __init__(self, store: Store, manifest: Manifest):
        self.store, self.manifest, self.bytes_read = store, manifest, 0

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """One reader serves one checkpoint; there is nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self.manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to make ready: the manifest is here already."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False  # a store is opened by truestep.storage, not from a path

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.apply(self.fetch(plan), planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def fetch(self, plan: LoadPlan) -> list[_Buffer]:
        """Read and verify every needed block; CheckpointError or StorageError names object and tensor."""
        buffers = _coalesce([self._want(item) for item in plan.items])
        for buffer in buffers:
            buffer.data = host_bytes(buffer.stop - buffer.start)
        requests = [(buffer, blocks) for buffer in buffers for blocks in _requests(buffer, self.store.request_bytes)]
        for count, (buffer, _) in zip(self._read_all(requests), requests, strict=True):
            self.bytes_read += count
            self.store.event(f"{buffer.object}: blocks verified")
        return buffers

    def apply(self, buffers: list[_Buffer], planner: LoadPlanner) -> None:
        """Copy what was fetched into the planner's targets, giving up each buffer as it is done."""
        with torch.no_grad():
            for buffer in buffers:
                for want in buffer.wants:
                    target = planner.resolve_tensor(want.item).detach()
                    target.copy_(_box(buffer, want))
                    planner.commit_tensor(want.item, target)
                buffer.data = None
                self.store.event(f"{buffer.object}: applied")

    def _want(self, item: ReadItem) -> _Want:
        name = item.storage_index.fqn
        entry = self.manifest.tensors[self.manifest.aliases.get(name, name)]
        offsets = tuple(item.storage_index.offset or ())
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == offsets)
        dtype = dtype_of(entry.dtype, name)
        strides = _strides(chunk.sizes)
        first = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(item.lengths, strides, strict=True))
        block_bytes = chunk.block_bytes
        stop = ((last + 1) * dtype.itemsize - 1) // block_bytes + 1
        return _Want(item, name, chunk, dtype, first * dtype.itemsize // block_bytes, stop)

    def _read_all(self, requests: list[_Request]) -> Iterator[int]:
        """Bytes of each request, in order; as many at once as keep the store busy."""
        if len(requests) <= 1 or self.store.requests_at_once == 1:
            yield from (self._read(*request) for request in requests)
            return
        with ThreadPoolExecutor(self.store.requests_at_once) as pool:
            yield from pool.map(lambda request: self._read(*request), requests)

    def _read(self, buffer: _Buffer, blocks: list[tuple[_Want, int]]) -> int:
        """One range request for neighbouring blocks, each verified."""
        start = blocks[0][0].chunk.block_range(blocks[0][1])[0]
        stop = blocks[-1][0].chunk.block_range(blocks[-1][1])[1]
        assert buffer.data is not None
        view = raw_bytes(buffer.data)[start - buffer.start : stop - buffer.start]

        def check(data: memoryview) -> str | None:
            for want, block in blocks:
                first, last = want.chunk.block_range(block)
                if block_digest(data[first - start : last - start]) != want.chunk.digest(block):
                    return f"bytes {first} to {last} of tensor {want.name} are not those that were saved"
            return None

        read_checked(self.store, buffer.object, start, view, check)
        return stop - start


def _strides(sizes: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return strides[::-1]


def _coalesce(wants: list[_Want]) -> list[_Buffer]:
    """Neighbouring and overlapping spans share a buffer, so that every byte is read once."""
    buffers: list[_Buffer] = []
    for want in sorted(wants, key=lambda want: (want.chunk.object, want.span)):
        start, stop = want.span
        last = buffers[-1] if buffers else None
        joins = last is not None and last.object == want.chunk.object and start <= last.stop
        if last is not None and joins and (start < last.stop or stop - last.start <= BUFFER_BYTES):
            last.stop = max(last.stop, stop)
            last.wants.append(want)
        else:
            buffers.append(_Buffer(want.chunk.object, start, stop, [want]))
    return buffers


def _requests(buffer: _Buffer, request_bytes: int) -> Iterator[list[tuple[_Want, int]]]:
    """The buffer's blocks in order, each once, in groups of one request's size."""
    group: list[tuple[_Want, int]] = []
    size, done = 0, buffer.start
    for want in buffer.wants:
        for block in range(want.first, want.stop):
            start, stop = want.chunk.block_range(block)
            if start < done:
                continue  # shared with the want before
            group.append((want, block))
            size, done = size + stop - start, stop
            if size >= request_bytes:
                yield group
                group, size = [], 0
    if group:
        yield group


def _box(buffer: _Buffer, want: _Want) -> torch.Tensor:
    """The wanted box of the chunk as a view of the buffer."""
    assert buffer.data is not None
    strides = _strides(want.chunk.sizes)
    first = sum(o * s for o, s in zip(want.item.storage_offsets, strides, strict=True))
    begin = want.span[0] - buffer.start
    flat = buffer.data[begin : want.span[1] - buffer.start].view(want.dtype)
    skipped = (want.span[0] - want.chunk.start) // want.dtype.itemsize
    return flat.as_strided(tuple(want.item.lengths), strides, flat.storage_offset() + first - skipped)
