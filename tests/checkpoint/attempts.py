"""What the tests of faults do again and again: attempts of a small run on any number of ranks, and what must hold."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.checkpoint.common import assert_same
from tests.checkpoint.disks import Recorder
from tests.checkpoint.small import At
from truestep.checkpoint.catalogue import Committed, begin_epoch, list_committed
from truestep.checkpoint.checkpointer import Checkpointer, SaveResult
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import load, load_newest
from truestep.checkpoint.verify import verify
from truestep.numerics.pieces import Piece, span
from truestep.storage.interface import Store
from truestep.storage.local import LocalStore

SHAPES = {"model.w": (7, 3), "model.wide": (3, 70), "optim.w.exp_avg": (7, 3), "optim.wide.exp_avg": (3, 70)}
BLOCK_BYTES = 512
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


def state(step: int) -> dict[str, torch.Tensor]:
    """Whole tensors of several dtypes, others at every step."""
    made = torch.Generator().manual_seed(step)
    found = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    return found | {
        "model.half": torch.randn(5, 2, generator=made).bfloat16(),
        "model.flags": torch.rand(9, generator=made) > 0.5,
        "optim.step": torch.tensor(float(step)),
    }


def extra(step: int) -> dict[str, Any]:
    return {"step": step, "loader": {"next_row": 10 * step}}


def cut(whole: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, Piece]:
    """The rank's rows of every tensor, without any process group; scalars are everybody's."""
    found = {}
    for name, x in whole.items():
        start, stop = span(len(x), world, rank) if x.dim() else (0, 0)
        local = x[start:stop].clone() if x.dim() else x.clone()
        found[name] = Piece(local, tuple(x.shape), (start, *[0] * (x.dim() - 1)) if x.dim() else ())
    return found


def blank(rank: int = 0, world: int = 1) -> dict[str, Piece]:
    """Pieces to load into, of other values."""
    return cut({name: x.clone() for name, x in state(999).items()}, rank, world)


def same(pieces: dict[str, Piece], step: int, rank: int = 0, world: int = 1) -> None:
    """Assert that the pieces hold what was saved at a step, bit for bit."""
    want = cut(state(step), rank, world)
    assert_same({name: piece.local for name, piece in pieces.items()}, {n: piece.local for n, piece in want.items()})


def attempt(
    store: Store,
    steps: Collection[int],
    *,
    rank: int = 0,
    world: int = 1,
    kv: dist.Store | None = None,
    deadline_s: float = 30.0,
    asynchronous: bool = True,
) -> tuple[int | None, list[SaveResult]]:
    """What a restart of a run does: begin an epoch, load the newest, save. The step it went on from, the results."""
    group = Group.of(kv, rank, world, deadline_s)
    number = group.share("epoch", begin_epoch(store).number if rank == 0 else None)
    targets = blank(rank, world)
    loaded = load_newest(store, targets, group=group, attempt=number)
    if loaded is not None:
        same(targets, loaded.step, rank, world)
        assert loaded.extra == extra(loaded.step)
    checkpointer = Checkpointer(
        store, attempt=number, rank=rank, world=world, kv=kv, block_bytes=BLOCK_BYTES, deadline_s=deadline_s
    )
    results = []
    for step in steps:
        save = checkpointer.save(step, cut(state(step), rank, world), extra(step), asynchronous=asynchronous)
        results.append(save.result())
    checkpointer.close()
    return loaded.step if loaded else None, results


def check(store: Store, must: Collection[int], may: Collection[int] = ()) -> set[int]:
    """Assert that the steps that can be loaded are those that must be there, perhaps with some that may, each bitwise
    right in every byte, and that the newest is the one that is taken. Returns them."""
    committed = list_committed(store)
    steps = {each.step for each in committed}
    assert set(must) <= steps <= {*must, *may}, f"steps {steps} are there, {must} must be, {may} may be"
    for each in committed:
        assert verify(store, each) == []
        targets = blank()
        assert load(store, each, targets).extra == extra(each.step)
        same(targets, each.step)
    targets = blank()
    loaded = load_newest(store, targets)
    if committed:
        assert loaded is not None and loaded.step == max(steps)
        assert all("without a commit" in note for note in loaded.fell_back), loaded.fell_back
        same(targets, loaded.step)
    else:
        assert loaded is None
    return steps


def go_on(store: Store, before: Collection[int], step: int) -> None:
    """Assert that a new attempt takes up the newest of the steps and that its save works."""
    resumed, (saved,) = attempt(store, [step])
    assert resumed == max(before, default=None) and saved.ok, saved.error
    check(store, {*before, step})


def strike(number: int) -> Callable[[], None]:
    """Send oneself a signal: to the calling thread, which does not get any further before the process stops."""
    return lambda: signal.pthread_kill(threading.get_ident(), number)


class Forked:
    """The ranks of an attempt, each a process of its own, with events and a disk of its own."""

    def __init__(
        self,
        root: Path,
        steps: Collection[int],
        events: Sequence[At],
        *,
        disks: Sequence[Recorder | None] = (),
        deadline_s: float = 30.0,
    ):
        self.folder, self.steps, self.deadline_s = root, steps, deadline_s
        self.pids: list[int] = []
        self.pipes: list[int] = []
        for rank, event in enumerate(events):
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(ours)
                self._run(theirs, rank, len(events), event, disks[rank] if disks else None)
            os.close(theirs)
            self.pids.append(pid)
            self.pipes.append(ours)

    def _run(self, pipe: int, rank: int, world: int, event: At, disk: Recorder | None) -> None:
        try:
            torch.set_num_threads(1)
            kv = dist.FileStore(f"{self.folder}.kv", world) if world > 1 else None
            store = LocalStore(self.folder, event, disk)
            said = attempt(store, self.steps, rank=rank, world=world, kv=kv, deadline_s=self.deadline_s)
        except BaseException as error:
            said = repr(error)
        try:
            with open(pipe, "wb") as out:
                pickle.dump((said, event.names, disk.calls if disk else []), out)
        finally:
            os._exit(0)

    def wait(self, rank: int) -> int:
        """The exit code of a rank, or less the signal that killed it."""
        _, status = os.waitpid(self.pids[rank], 0)
        self.pids[rank] = 0
        return os.waitstatus_to_exitcode(status)

    def said(self, rank: int) -> Any:
        """(what `attempt` returned or the error's text, names of events, calls), or None if the rank died."""
        data = b"".join(iter(lambda: os.read(self.pipes[rank], 1 << 16), b""))
        return pickle.loads(data) if data else None

    def end(self, grace_s: float = 0.0) -> list[Any]:
        """Kill those that still run, after a moment in which they may go on; give everything back. What each said that
        nobody has asked for."""
        until = time.monotonic() + grace_s
        for rank, pid in enumerate(self.pids):
            while pid and time.monotonic() < until and not os.waitid(os.P_PID, pid, _ENDED):
                time.sleep(0.002)
            if pid:
                os.kill(pid, signal.SIGKILL)
                self.wait(rank)
        said = [self.said(rank) for rank in range(len(self.pipes))]
        for pipe in self.pipes:
            os.close(pipe)
        return said


def commits_of(names: list[str], committed: Committed) -> int:
    """The number (from 1) of the event after which a commit is there."""
    return names.index(f"{committed.key}: linked") + 1
