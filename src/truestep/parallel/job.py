"""Joining a job: device, process groups, and small agreements between ranks.

The *data* group carries tensors on the device (NCCL or gloo). The *control* group is always gloo and carries a few
numbers a step, so that no decision waits for a GPU stream. `store` is the job's key-value store (deadlines, messages).
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from truestep.errors import HeardError, UserError
from truestep.parallel.environment import Place, rendezvous_variables
from truestep.parallel.failure import FailureWatch


@dataclass(frozen=True)
class Job:
    """One process's membership. World size 1 has no groups and no store unless it was started by a launcher."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    launcher: str
    control: dist.ProcessGroup | None = None
    store: Any = None  # torch.distributed.Store, whose type stub lacks clone()
    watch: FailureWatch | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_sum(self, values: list[float]) -> list[float]:
        """Sum float64 values over all ranks; the same result on every rank."""
        if self.control is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def all_max(self, values: list[float]) -> list[float]:
        """The largest of float64 values over all ranks; the same result on every rank."""
        if self.control is None:
            return values
        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control)
        return largest.tolist()

    def agree(self, name: str, decide: Callable[[], Any]) -> Any:
        """Rank 0 calls `decide` (however long it takes) and every rank returns its JSON-able result.

        Where rank 0 raises a UserError, the others raise a HeardError with its sentence. `name` is unique in the job.
        """
        if self.store is None:
            return decide()
        key = f"agree/{name}"
        if not self.first:
            return self._hear(key)
        try:
            result = decide()
        except BaseException as error:
            sentence = str(error) if isinstance(error, UserError) else f"rank 0 failed: {error!r}"
            self.store.set(key, json.dumps({"error": sentence}))
            raise
        self.store.set(key, json.dumps({"result": result}))
        return result

    def _hear(self, key: str) -> Any:
        assert self.store is not None
        # Looking has no deadline: building a corpus takes as long as it takes, and a rank 0 that dies takes the store
        # with it, which raises here. (A wait with one would have c10d print warnings on every rank.)
        while not self.store.check([key]):
            time.sleep(0.05)
        message = json.loads(self.store.get(key))
        if "error" in message:
            raise HeardError(message["error"])
        return message["result"]

    def settle(self, error: BaseException) -> BaseException:
        """What this rank is to end with after `error`: the first rank that fails says why, the others have heard."""
        return self.watch.settle(error) if self.watch else error

    def leave(self, meet: bool) -> None:
        """Give the process groups up. Ranks that end in order meet first, since rank 0 may hold the store."""
        if self.watch:
            self.watch.stop()
        if meet:
            self.all_sum([0.0])
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """ "auto" takes this process's GPU where there is one. Raises UserError where "cuda" was asked for in vain."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            'machine.device is "cuda", but torch sees no CUDA device here; '
            'set it to "cpu", or install a CUDA build of torch'
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"this host has {count} GPUs but runs local rank {local_rank}; "
            f"start at most {count} processes a host (machine.processes)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def choose_threads(threads: int, local_world: int) -> int:
    """CPU threads of this process: as asked, or its share of the cores."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = threads or max(1, available // local_world)
    torch.set_num_threads(chosen)
    return chosen


def join(place: Place | None, *, device: str, threads: int, timeout_s: float) -> Job:
    """Join the job that `place` describes (None: this process alone)."""
    if place is None:
        choose_threads(threads, 1)
        return Job(0, 1, 0, 1, choose_device(device, 0), "none")
    choose_threads(threads, place.local_world)
    rendezvous_variables(os.environ, place)
    timeout = timedelta(seconds=timeout_s)
    store, rank, world = next(dist.rendezvous("env://", place.rank, place.world, timeout=timeout))
    store.set_timeout(timeout)
    kept = dist.PrefixStore("truestep", store)
    watch = FailureWatch(kept.clone(), rank, world)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        chosen = choose_device(device, place.local_rank)
    except UserError as error:
        raise watch.settle(error) from None
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("data", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=chosen if chosen.type == "cuda" else None,
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    return Job(rank, world, place.local_rank, place.local_world, chosen, place.launcher, control, kept, watch)
