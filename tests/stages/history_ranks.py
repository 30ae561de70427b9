"""Ranks that live through histories of a run: forked once, attempt after attempt runs in them, until one is killed.

An attempt is `truestep.stages.run.carry_out` itself, on gloo. What is to befall it is told beforehand: at the k-th
event of a kind a rank kills itself, stops itself as a paused machine does, or asks politely for a stop; and while it
runs, every rank writes down which rows each step was given, by what they hold.
"""

import errno
import gc
import json
import os
import pickle
import re
import signal
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tests.dist import free_port
from truestep.data.loader import Loader
from truestep.errors import Lost, UserError
from truestep.losses.base import LossSum
from truestep.losses.cross_entropy import CrossEntropy
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput
from truestep.parallel import model
from truestep.parallel.environment import place
from truestep.parallel.groups import forget_meshes
from truestep.recipe.load import load
from truestep.runlog import log as runlog
from truestep.runlog.log import RunLog
from truestep.stages import resume
from truestep.stages.run import STAGES, carry_out
from truestep.storage import local
from truestep.storage.disk import Disk
from truestep.train import loop
from truestep.train.saves import Saves
from truestep.train.state import TrainState

BAD = 255  # a byte that no text has
KINDS = ("step", "forward", "backward", "store", "log")
PATIENCE_S = 120.0


class NanOnBad(CrossEntropy):
    """Cross-entropy that is not a number where a label is BAD."""

    def __call__(self, out: HeadInput, batch: Batch) -> LossSum:
        found = super().__call__(out, batch)
        good = torch.where((batch.labels_BT == BAD).any(), torch.nan, 1.0)
        return LossSum(found.sum * good, found.metrics)


@dataclass(frozen=True)
class Strike:
    """What a rank does to itself at the `count`-th event (from 1) of one of KINDS: at the beginning of a step, after a
    microbatch's forward pass, in its backward pass, in the store of checkpoints, after a record of the log."""

    act: Literal["kill", "pause", "stop"]
    rank: int
    event: str
    count: int


@dataclass(frozen=True)
class Told:
    """What an attempt is to go through. `saves`: steps after which a save is due. `full`: (step, how often) of saves
    for which the disk has no room. `bad`: global rows with BAD labels. `ledger`: the file of what was trained on."""

    ledger: Path
    strikes: tuple[Strike, ...] = ()
    saves: frozenset[int] = frozenset()
    full: tuple[tuple[int, int], ...] = ()
    bad: tuple[int, ...] = ()


@dataclass
class _Life:
    """Of one rank in one attempt."""

    told: Told
    rank: int
    pipe: Connection
    attempt: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    room: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def happened(self, event: str) -> None:
        self.counts[event] += 1
        for strike in self.told.strikes:
            if (strike.rank, strike.event, strike.count) == (self.rank, event, self.counts[event]):
                self._strike(strike)

    def _strike(self, strike: Strike) -> None:
        if strike.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif strike.act == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.say(("paused", self.told.strikes.index(strike)))
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def say(self, word: Any) -> None:
        with self.lock:
            self.pipe.send_bytes(pickle.dumps(word))

    def write_down(self, state: TrainState, batches: Sequence[Batch], num_targets: int) -> None:
        """The rows that this rank is about to train on, by what they hold and by the number of their microbatch."""
        data_rank, rows = state.parallel.groups.data_rank, []
        for index, batch in enumerate(batches):
            here = batch.documents_BT is not None and (batch.documents_BT >= 0).any(1)
            number = state.number(index, data_rank)
            rows += [[number, *row] for row in batch.tokens_BT[here].tolist()]
        line = json.dumps([self.attempt, state.step + 1, self.rank, data_rank, rows, num_targets])
        file = os.open(self.told.ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode() + b"\n")
        os.close(file)


class FullDisk(Disk):
    """Without room for the checkpoints of some steps, each so often."""

    def create(self, path: Path) -> int:
        found = re.search(r"/steps/0*(\d+)-", str(path))
        if found and _now[0].room.get(int(found[1]), 0) > 0:
            _now[0].room[int(found[1])] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


_now: list[_Life] = []


def _install() -> None:
    """Put the events and the ledger in place, once in a process's life."""
    real_step, real_forward, real_append, real_rows = loop.train_step, model.forward, RunLog.append, Loader.rows
    real_open, real_stage = resume.open_store, STAGES["pretrain"]

    def train_step(state: TrainState, batches: list[Batch], num_targets: int, questions: list[float]) -> Any:
        _now[0].happened("step")
        _now[0].write_down(state, batches, num_targets)
        return real_step(state, batches, num_targets, questions)

    def forward(*arguments: Any) -> Any:
        result = real_forward(*arguments)
        if torch.is_grad_enabled():
            _now[0].happened("forward")
            result[0].register_hook(lambda gradient: _now[0].happened("backward"))
        return result

    def append(self: RunLog, kind: str, /, **values: Any) -> None:
        real_append(self, kind, **values)
        _now[0].happened("log")

    def rows(self: Loader, global_rows: np.ndarray) -> Batch:
        batch = real_rows(self, global_rows)
        here = torch.from_numpy(np.isin(global_rows, _now[0].told.bad))[:, None]
        labels_BT = torch.where(here & (batch.labels_BT != IGNORE), BAD, batch.labels_BT)
        return Batch(batch.tokens_BT, labels_BT, batch.positions_BT, batch.documents_BT)

    def open_store(*arguments: Any) -> Any:
        store = real_open(*arguments)
        store.event = lambda name: _now[0].happened("store")
        return store

    def stage(context: Any, section: Any) -> str:
        _now[0].attempt = context.attempt
        return real_stage(context, section)

    loop.train_step, model.forward, resume.open_store = train_step, forward, open_store
    RunLog.append, Loader.rows, STAGES["pretrain"] = append, rows, stage  # pyright: ignore[reportAttributeAccessIssue]
    Saves.due_by_step = lambda self: self._state.step in _now[0].told.saves
    runlog._lock = lambda file, mode: None  # a file system without locks: of a paused host nobody knows
    local.Disk = FullDisk


def _serve(pipe: Connection) -> None:
    """The life of a rank's process."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TRUESTEP_HOST": f"host-{os.getpid()}"}
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is never garbage: collecting takes 1 ms instead of 150
    _install()
    while True:
        body, rank, world, port, told = pickle.loads(pipe.recv_bytes())
        life = _Life(told, rank, pipe, room=dict(told.full))
        _now[:] = [life]
        end = _attempt(body, rank, world, port)
        forget_meshes()
        gc.collect()
        life.say(("ended", *end))


def _attempt(body: dict, rank: int, world: int, port: int) -> tuple[str, str]:
    """How it ended, and what was said."""
    here = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()}
    try:
        return carry_out(load(body), place(os.environ) if world > 1 else None, "truestep run x"), ""
    except UserError as error:
        return "refused", str(error)
    except Lost as error:
        return "lost", str(error)
    except BaseException as error:
        return "failed", "".join(traceback.format_exception(error))


class _Process:
    """A forked rank and the pipe to it. `others`: pipes of its siblings, which it is not to hold open."""

    def __init__(self, others: Sequence[Connection]):
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for pipe in (self.pipe, *others):
                    pipe.close()
                _serve(theirs)
            finally:
                os._exit(1)
        theirs.close()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


@dataclass
class Attempt:
    """One that runs on these processes. `said` by rank, as far as they have ended; `killed`: one has killed itself."""

    processes: list[_Process]
    said: dict[int, tuple[str, str]] = field(default_factory=dict)
    killed: bool = False
    over: bool = False

    def wait(self) -> int | None:
        """Until it ends (None), or a rank stops itself: the number of its strike. Then all of them are stopped."""
        while waiting := {p.pipe: rank for rank, p in enumerate(self.processes) if rank not in self.said}:
            ready = wait(list(waiting), timeout=PATIENCE_S)
            assert ready, f"ranks {sorted(waiting.values())} still run after {PATIENCE_S} s; {self.said}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    word = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self.killed = self.over = True
                    return None
                if word[0] == "paused":
                    os.waitpid(self.processes[rank].pid, os.WUNTRACED)
                    self.signal(signal.SIGSTOP)
                    return word[1]
                self.said[rank] = word[1:]
        self.over = True
        return None

    def signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def outcome(self) -> str:
        """How it ended; AssertionError where a rank failed by an error of the program."""
        failed = [said for said in self.said.values() if said[0] == "failed"]
        assert not failed or self.killed, failed[0][1]
        return "killed" if self.killed else self.said[0][0]


class Ranks:
    """Starts attempts on idle processes. Those that did not end well are not used again."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # a forked pool of OpenMP threads may hang
        self._all: list[_Process] = []
        self._idle: list[_Process] = []

    def start(self, body: dict, world: int, told: Told) -> Attempt:
        while len(self._idle) < world:
            process = _Process([other.pipe for other in self._all])
            self._all.append(process)
            self._idle.append(process)
        chosen, self._idle = self._idle[:world], self._idle[world:]
        port = free_port()
        for rank, process in enumerate(chosen):
            process.pipe.send_bytes(pickle.dumps((body, rank, world, port, told)))
        return Attempt(chosen)

    def end(self, attempt: Attempt) -> None:
        """Take the processes back; those that still run are killed, as by who started them."""
        for rank, process in enumerate(attempt.processes):
            if not attempt.killed and attempt.said.get(rank, ("",))[0] in ("finished", "stopped"):
                self._idle.append(process)
            else:
                process.kill()
                self._all.remove(process)

    def close(self) -> None:
        for process in self._all:
            process.kill()
        self._all, self._idle = [], []
