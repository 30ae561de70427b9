"""Joining a job: device, process groups, and small agreements between ranks.

The *data* group carries tensors on the device (NCCL or gloo). The *control* group is always gloo and carries a few
numbers a step, so that no decision waits for a GPU stream. `store` is the job's key-value store (deadlines, messages).
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from truestep.errors import HeardError, Lost, UserError
from truestep.parallel.environment import Place, host_name, rendezvous_variables
from truestep.parallel.failure import FailureWatch
from truestep.runlog.counters import Counters


@dataclass(frozen=True)
class Job:
    """One process's membership. World size 1 has no groups and no store unless it was started by a launcher.

    `hosts`: by rank, the names of the failure domains (TRUESTEP_HOST, else the machine's name). `counters` say from
    outside how far this rank is."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device
    launcher: str
    control: dist.ProcessGroup | None = None
    store: Any = None  # torch.distributed.Store, whose type stub lacks clone()
    watch: FailureWatch | None = None
    hosts: tuple[str, ...] = ("",)
    counters: Counters = field(default_factory=Counters)

    @property
    def host(self) -> str:
        return self.hosts[self.rank] if self.rank < len(self.hosts) else ""

    @property
    def lost(self) -> threading.Event | None:
        """Set once a process of the job is known to be gone, for whoever waits without a collective."""
        return self.watch.lost if self.watch else None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_sum(self, values: list[float]) -> list[float]:
        """Sum float64 values over all ranks; the same result on every rank."""
        if self.control is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with self.counters.collective():
            dist.all_reduce(total, group=self.control)
        return total.tolist()

    def all_max(self, values: list[float]) -> list[float]:
        """The largest of float64 values over all ranks; the same result on every rank."""
        if self.control is None:
            return values
        largest = torch.tensor(values, dtype=torch.float64)
        with self.counters.collective():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control)
        return largest.tolist()

    def everybody(self, mine: Any) -> list[Any]:
        """What each rank has to say, by rank, on all of them; anything that can be pickled."""
        if self.control is None:
            return [mine]
        told: list[Any] = [None] * self.world
        with self.counters.collective():
            dist.all_gather_object(told, mine, group=self.control)
        return told

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
            if self.lost and self.lost.is_set():
                raise Lost(f"a process is gone while rank {self.rank} waited for rank 0")
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


def join(place: Place | None, *, device: str, threads: int, timeout_s: float, regroups: bool = False) -> Job:
    """Join the job that `place` describes (None: this process alone). `regroups`: see FailureWatch."""
    if place is None:
        choose_threads(threads, 1)
        hosts, counters = (host_name(os.environ),), Counters.of(os.environ, 0, 0)
        return Job(0, 1, 0, 1, choose_device(device, 0), "none", hosts=hosts, counters=counters)
    choose_threads(threads, place.local_world)
    rendezvous_variables(os.environ, place)
    timeout = timedelta(seconds=timeout_s)
    store, rank, world = next(dist.rendezvous("env://", place.rank, place.world, timeout=timeout))
    store.set_timeout(timeout)
    kept = dist.PrefixStore("truestep", store)
    hosts, pids = _meet(kept, rank, world)
    watch = FailureWatch(kept.clone(), rank, world, pids, regroups)  # pyright: ignore[reportAttributeAccessIssue]
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
    counters = Counters.of(os.environ, place.local_rank, rank)
    here = (rank, world, place.local_rank, place.local_world, chosen, place.launcher)
    return Job(*here, control, kept, watch, hosts, counters)


def _meet(store: dist.Store, rank: int, world: int) -> tuple[tuple[str, ...], list[int]]:
    """The host names of all ranks, and the process ids of the others that this machine's kernel knows."""
    mine = [host_name(os.environ), _kernel(), os.getpid()]
    store.set(f"joined/{rank}", json.dumps(mine))
    if rank == 0:
        store.set("joined", json.dumps([json.loads(store.get(f"joined/{other}")) for other in range(world)]))
    everybody = json.loads(store.get("joined"))
    pids = [pid for other, (_, kernel, pid) in enumerate(everybody) if kernel == mine[1] and other != rank]
    return tuple(host for host, _, _ in everybody), pids


def _kernel() -> str:
    """Names the running kernel and its space of process ids; what has no /proc names itself alone."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    known = boot.exists() and space.is_symlink()
    return f"{boot.read_text().strip()} {os.readlink(space)}" if known else f"{socket.gethostname()} {os.getpid()}"
