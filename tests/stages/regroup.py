"""An agent in small: forks the ranks of a run, kills one at a numbered event, and gives the survivors new places."""

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.dist import free_port
from truestep.errors import Lost, UserError
from truestep.parallel import model, orders
from truestep.parallel.environment import Place, place
from truestep.recipe.load import load
from truestep.stages import resume
from truestep.stages.run import carry_out
from truestep.storage.interface import Store


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a rank at the `count`-th event of a kind: forward, backward, evaluate, or one of the store's."""

    rank: int
    event: str
    count: int

    def arm(self) -> None:
        """Count in this process."""
        left = [self.count]

        def strike() -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        if self.event in ("forward", "backward"):
            _in_forward(strike, backward=self.event == "backward")
        elif self.event == "evaluate":
            _before(model.Parallel, "evaluate", strike)
        else:
            _at_event(self.event, strike)


def _at_event(wanted: str, strike: Callable[[], None]) -> None:
    real = resume.open_store

    def opened(*arguments: Any) -> Store:
        store = real(*arguments)
        store.event = lambda name: strike() if name == wanted else None
        return store

    resume.open_store = opened


def _before(owner: Any, name: str, action: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        action()
        return real(*arguments, **options)

    setattr(owner, name, wrapped)


def _in_forward(strike: Callable[[], None], backward: bool) -> None:
    real = model.forward

    def forward(*arguments: Any) -> Any:
        result = real(*arguments)
        if not torch.is_grad_enabled():
            return result
        if backward:
            result[0].register_hook(lambda gradient: strike())
        else:
            strike()
        return result

    model.forward = forward


@dataclass
class Worker:
    """A forked rank and the socket at which it waits for orders."""

    pid: int
    rank: int
    listener: socket.socket
    line: socket.socket | None = None
    code: int | None = None


@dataclass
class Agent:
    """`replace`: start a new process for one that is gone, instead of going on with fewer. `codes`: how processes that
    were not killed ended. `left`: what each survivor of a failure still held when it had let go of its group:
    threads and sockets more than at its birth."""

    folder: Path
    body: dict
    world: int
    replace: bool = False
    said: list[dict] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    left: list[tuple[int, int]] = field(default_factory=list)
    _made: int = 0

    def run(self, *kills: Kill, timeout_s: float = 60.0) -> None:
        """Until every process has ended; raises what one of them says that failed by itself."""
        port = free_port()
        workers = [self._fork(rank, self.world, port, kills) for rank in range(self.world)]
        deadline = time.monotonic() + timeout_s
        try:
            while any(worker.code is None for worker in workers):
                assert time.monotonic() < deadline, [(w.rank, w.code, w.line) for w in workers]
                workers = self._look(workers)
                time.sleep(0.005)
        finally:
            for worker in workers:
                if worker.code is None:
                    os.kill(worker.pid, signal.SIGKILL)
                    os.waitpid(worker.pid, 0)
                worker.listener.close()

    def _look(self, workers: list[Worker]) -> list[Worker]:
        for worker in workers:
            if worker.code is None and os.waitpid(worker.pid, os.WNOHANG)[0]:
                worker.code = -signal.SIGKILL
                worker.code = self._code(worker)
            if worker.line is None and worker.code is None:
                _accept(worker)
        lost = [worker for worker in workers if worker.code == -signal.SIGKILL]
        waiting = [worker for worker in workers if worker.line is not None]
        if not lost or len(lost) + len(waiting) < len(workers):
            return workers
        return self._regroup(waiting, len(lost))

    def _regroup(self, waiting: list[Worker], lost: int) -> list[Worker]:
        world = len(waiting) + (lost if self.replace else 0)
        port = free_port()
        new = [self._fork(rank, world, port, ()) for rank in range(len(waiting), world)]
        for rank, worker in enumerate(waiting):
            assert worker.line is not None
            self.said.append(json.loads(worker.line.makefile("rb").readline()))
            order = {"rank": rank, "world": world, "local_rank": rank, "local_world": world}
            order |= {"master_addr": "127.0.0.1", "master_port": port}
            worker.line.sendall(json.dumps(order).encode() + b"\n")
            worker.line.close()
            worker.line, worker.rank = None, rank
        return waiting + new

    def _code(self, worker: Worker) -> int:
        file = self.folder / f"code-{worker.pid}"
        if not file.exists():
            return -signal.SIGKILL
        code, text = file.read_text().split("\n", 1)
        self.codes.append(int(code))
        assert int(code) == 0, text
        self.left += [tuple(held) for held in json.loads(text)]
        return 0

    def _fork(self, rank: int, world: int, port: int, kills: tuple[Kill, ...]) -> Worker:
        self._made += 1
        path = self.folder / f"door-{self._made}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1)
        listener.setblocking(False)
        pid = os.fork()
        if pid == 0:
            self._worker(rank, world, port, path, kills)
        return Worker(pid, rank, listener)

    def _worker(self, rank: int, world: int, port: int, door: Path, kills: tuple[Kill, ...]) -> None:
        variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        variables |= {"TRUESTEP_ORDERS": door, "TRUESTEP_HOST": f"host-{self._made}", "TRUESTEP_SUPERVISED": 1}
        os.environ |= {name: str(value) for name, value in variables.items()}
        torch.set_num_threads(1)
        code, text, born, left = 70, "", _held(), []
        ask = orders.Orders.ask

        def asking(own: orders.Orders, why: str) -> Place | None:
            left.append([now - before for now, before in zip(_held(), born)])
            return ask(own, why)

        orders.Orders.ask = asking
        try:
            for kill in kills:
                if kill.rank == rank:
                    kill.arm()
            carry_out(load(self.body), place(os.environ), "truestep run x")
            code, text = 0, json.dumps(left)
        except UserError as error:
            code, text = 2, str(error)
        except Lost as error:
            text = f"lost: {error}"
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
        finally:
            (self.folder / f"code-{os.getpid()}").write_text(f"{code}\n{text}")
            os._exit(0)


def _held() -> tuple[int, int]:
    """Threads and sockets of this process."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return len(os.listdir("/proc/self/task")), sum(link.startswith("socket:") for link in links)


def _accept(worker: Worker) -> None:
    try:
        worker.line, _ = worker.listener.accept()
    except BlockingIOError:
        return
    worker.line.setblocking(True)
