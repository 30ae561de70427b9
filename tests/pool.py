"""A pool of ranks for tests: eight processes forked once, in which task after task runs, each with a fresh gloo world.

A task is a function of a module that can be imported, called as fn(rank, world, *args) on the first `world` ranks. It
costs, beside its own work, the joining and leaving of a world: 11 ms for one rank, 54 for four, 98 for eight (2 cores).
"""

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Self

import torch
import torch._dynamo  # imported in the parent: a child that imports it anew spends seconds
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

GRACE_S = 2.0
"""How long the other ranks of a task may take to end once one has failed; then they are killed."""
ECHO = "Connection closed by peer"
"""What gloo says on the ranks that talked to one that failed."""


class RankError(RuntimeError):
    """A task failed on a rank; the text is that rank's traceback."""


class Pool:
    """`run` calls a function on ranks. A failed or stuck task costs only the ranks that do not end: they are forked
    anew. Not for use from several threads."""

    def __init__(self, size: int = 8):
        torch.set_num_threads(1)  # a forked pool of OpenMP threads may hang
        self._folder = tempfile.TemporaryDirectory(prefix="truestep-pool-")
        self._ranks = [_Rank(number) for number in range(size)]
        self._tasks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the ranks, to see which lived on."""
        return [rank.process.pid for rank in self._ranks]

    def run(self, fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Results of fn(rank, world, *args) in rank order. RankError where one raises, TimeoutError after `timeout_s`;
        the pool can go on after both."""
        if world > len(self._ranks):
            raise ValueError(f"{world} ranks of a pool of {len(self._ranks)}")
        self._tasks += 1
        store = Path(self._folder.name) / str(self._tasks)
        ranks = self._ranks[:world]
        for number, rank in enumerate(ranks):
            rank.ours.send_bytes(pickle.dumps((fn, number, world, args, str(store), timeout_s)))
        try:
            return self._collect(ranks, timeout_s)
        finally:
            store.unlink(missing_ok=True)

    def _collect(self, ranks: list["_Rank"], timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting: dict[Any, int] = {rank.ours: number for number, rank in enumerate(ranks)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = waiting.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())  # pyright: ignore[reportAttributeAccessIssue]
                except (EOFError, ConnectionError):
                    good, value = False, f"rank {number} of {len(ranks)} died without a word"
                    ranks[number].again()
                if good:
                    results[number] = value
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failures.append(value)
        for number in waiting.values():
            ranks[number].again()
        if failures:
            raise RankError(min(failures, key=lambda text: ECHO in text))
        if waiting:
            raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(ranks)} still ran after {timeout_s} s")
        return [results[number] for number in range(len(ranks))]


class _Rank:
    """One process of the pool and the pipe to it."""

    def __init__(self, number: int):
        self.number = number
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.ours, theirs = context.Pipe()
        self.process: ForkProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.ours.close()

    def again(self) -> None:
        """A new process in this one's place."""
        self.kill()
        self._start()


def _serve(pipe: Connection) -> None:
    """The life of a rank: task after task, until the parent is gone."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is never garbage: collecting takes 1 ms instead of 150
    try:
        while True:
            answer = _call(*pickle.loads(pipe.recv_bytes()))
            pipe.send_bytes(answer)
    except (EOFError, ConnectionError):
        pass
    finally:
        os._exit(0)


def _call(fn: Callable[..., Any], rank: int, world: int, args: tuple, store: str, timeout_s: float) -> bytes:
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        answer = pickle.dumps((True, fn(rank, world, *args)))
    except BaseException as error:
        text = f"rank {rank} of {world}: {''.join(traceback.format_exception(error))}"
        answer = pickle.dumps((False, text))
    finally:
        _clear_python_sharding_prop_cache()  # DTensor keeps meshes, and with them groups and their threads
        _clear_fast_path_sharding_prop_cache()
        gc.collect()  # a model that lives in a cycle holds groups of a world that ends here
        if dist.is_initialized():
            dist.destroy_process_group()
    return answer
