"""Ranks for tests: forked from a parent that has imported torch, over gloo, with every failure brought home."""

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported in the parent: a child that imports it anew spends seconds
import torch.distributed as dist
import torch.distributed.tensor


def _child(fn: Callable[..., Any], rank: int, world: int, args: tuple, store: str, timeout_s: float, pipe: Connection):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    try:
        if store:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout
            )
        pipe.send_bytes(pickle.dumps((True, fn(rank, world, *args))))
        if store:
            dist.destroy_process_group()
    except BaseException as error:
        text = f"rank {rank} of {world}: {''.join(traceback.format_exception(error))}"
        pipe.send_bytes(pickle.dumps((False, text)))
    finally:
        pipe.close()
        os._exit(0)


def free_port() -> int:
    """One that nobody listens at just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_job(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """As `run_ranks`, but fn joins the job itself, by the variables that torchrun would set."""
    old = dict(os.environ)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        return _run(fn, world, args, timeout_s, group=False)
    finally:
        os.environ.clear()
        os.environ.update(old)


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call fn(rank, world, *args) on `world` forked ranks in a gloo group; return their results in rank order.

    The first failure is raised with the rank's traceback and the others are killed; so are all ranks at `timeout_s`.
    """
    return _run(fn, world, args, timeout_s, group=True)


def _run(fn: Callable[..., Any], world: int, args: tuple, timeout_s: float, group: bool) -> list[Any]:
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)  # a forked pool of OpenMP threads may hang
    results: list[Any] = [None] * world
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = {}, []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            store = str(Path(folder) / "store") if group else ""
            process = context.Process(target=_child, args=(fn, rank, world, args, store, timeout_s, theirs))
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        try:
            while pipes:
                ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(pipes.values())} of {world} still ran after {timeout_s} s")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = pipes.pop(pipe)
                    try:
                        good, value = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        raise RuntimeError(f"rank {rank} of {world} died without a word") from None
                    if not good:
                        raise RuntimeError(value)
                    results[rank] = value
        finally:
            for process in processes:
                if process.is_alive() and pipes:
                    process.kill()
                process.join()
    return results
