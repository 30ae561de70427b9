"""Run one function over many items in fresh Python processes, which never inherit torch, its threads or locks.

`python -m truestep.data.processes` is such a process: it reads pickled (function, item) pairs from its parent's pipe
and answers each. It ends at once when the parent does, however that ends. (Unlike `multiprocessing`, it does not import
the caller's main module again, so it works from notebooks and from scripts without a main guard.)
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, TypeVar

from truestep.errors import DataError, UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(function: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[Result]:
    """Results as they become ready, in any order. With one worker everything runs here. `function` is a module's, and
    items and results are pickled. A UserError in a process is raised here; the other processes are then stopped."""
    if workers <= 1:
        yield from map(function, items)
        return
    todo: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in items:
        todo.put(item)
    answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    processes = [_start() for _ in range(min(workers, len(items)))]
    threads = [threading.Thread(target=_feed, args=(p, function, todo, answers), daemon=True) for p in processes]
    try:
        for thread in threads:
            thread.start()
        for _ in items:
            kind, value = answers.get()
            if kind == "wrong":
                raise value
            if kind == "failed":
                raise RuntimeError(f"a build process failed:\n{value}")
            yield value
    finally:
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()
        for process in processes:
            process.communicate()  # closes the pipes


def _start() -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "truestep.data.processes"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _feed(
    process: subprocess.Popen[bytes],
    function: Callable[[Any], Any],
    todo: queue.SimpleQueue[Any],
    answers: queue.SimpleQueue[tuple[str, Any]],
) -> None:
    assert process.stdin is not None and process.stdout is not None
    while True:
        try:
            item = todo.get_nowait()
        except queue.Empty:
            return
        try:
            pickle.dump((function, item), process.stdin)
            process.stdin.flush()
            answers.put(pickle.load(process.stdout))
        except (EOFError, OSError):
            died = DataError(f"a build process died (exit code {process.wait()}); free memory or use fewer workers.")
            answers.put(("wrong", died))
            return


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a source prints must not mix with the answers
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, todo), daemon=True).start()
    while True:
        function, item = todo.get()
        pickle.dump(_answer(function, item), answers)
        answers.flush()


def _listen(pipe: BinaryIO, todo: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            todo.put(pickle.load(pipe))
    except EOFError:
        os._exit(0)  # the parent is gone; nothing is left half-written, since a shard is published whole


def _answer(function: Callable[[Any], Any], item: Any) -> tuple[str, Any]:
    try:
        return "done", function(item)
    except UserError as error:
        return "wrong", error
    except Exception:
        return "failed", traceback.format_exc()


if __name__ == "__main__":
    _serve()
