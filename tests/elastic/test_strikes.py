"""Faults made from outside, on a process that counts and writes: each does what it says, and goes away."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.common import full_state, save_one
from truestep.elastic.proxy import Line
from truestep.elastic.strikes import PERIOD_S, STRIKES, Corrupt, Ground, Row
from truestep.recipe.chaos import OF_KIND, Fault
from truestep.storage.local import LocalStore

WORKER = """
import sys, time
number = 0
while True:
    number += 1
    try:
        with open(sys.argv[1], "wb") as file:
            file.write(b"x" * 100_000)
        said = "written"
    except OSError as error:
        said = error.strerror
    print(number, said, flush=True)
    time.sleep(0.002)
"""


@pytest.fixture
def worker(tmp_path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert said(process) == "written"
        yield process
        process.kill()


def said(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip().partition(" ")[2]


def made(kind: str, ground: Ground | None = None, **more):
    return STRIKES[kind](Fault.model_validate({"kind": kind, "step": 1} | more), ground or Ground([]))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def rows(process: subprocess.Popen, step: int = 1) -> list[Row]:
    return [Row(process.pid, 1, step)]


def test_there_is_a_strike_for_every_kind():
    assert STRIKES.keys() == OF_KIND.keys()


def test_kill(worker):
    assert made("kill", rank=1).begin(rows(worker)) is None
    assert worker.wait(10) == -9
    assert made("kill", rank=1).begin(rows(worker)) == "the process is gone"


def test_stop_and_go_on(worker):
    strike = made("stop", rank=1, seconds="200ms")
    assert strike.begin(rows(worker)) is None
    while strike.go_on(rows(worker)):
        time.sleep(0.01)
        assert state_of(worker.pid) in "TtR"
    assert state_of(worker.pid) == "T"
    strike.end()
    worker_goes_on(worker)


def worker_goes_on(worker: subprocess.Popen) -> None:
    deadline = time.monotonic() + 10
    while state_of(worker.pid) == "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(worker.pid) != "T" and said(worker) == "written"


def test_slow_stops_it_for_a_part_of_the_time_and_for_so_many_steps(worker):
    strike, stopped, looks = made("slow", rank=1, factor=4.0, steps=3), 0, 0
    assert strike.begin(rows(worker)) is None
    until = time.monotonic() + 8 * PERIOD_S
    while time.monotonic() < until:
        assert strike.go_on(rows(worker, step=3))
        stopped, looks = stopped + (state_of(worker.pid) == "T"), looks + 1
        time.sleep(0.002)
    assert 0.5 < stopped / looks < 0.95
    assert not strike.go_on(rows(worker, step=4))
    strike.end()
    worker_goes_on(worker)
    assert not strike.go_on([])  # it is gone


def test_fill_refuses_what_grows_too_large_in_that_process_only(worker, tmp_path):
    strike = made("fill", rank=1, seconds="1h", bytes="50KB")
    assert strike.begin(rows(worker)) is None and strike.go_on(rows(worker))
    refusals = [said(worker) for _ in range(200)]
    assert "File too large" in refusals[-1] and (tmp_path / "file").stat().st_size == 50_000
    (tmp_path / "mine").write_bytes(b"x" * 100_000)
    strike.end()
    assert "written" in [said(worker) for _ in range(200)]


def test_corrupt_changes_one_bit_of_the_newest_checkpoint(tmp_path):
    store = LocalStore(tmp_path / "base")
    strike = made("corrupt", Ground([tmp_path / "base", tmp_path / "none"]), element=7, bit=3)
    assert isinstance(strike, Corrupt) and strike.begin([]) == "there is no checkpoint"
    for step in (1, 2):
        save_one(store, step, full_state(step))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert strike.begin([]) is None
    (changed,) = [path for path, data in before.items() if path.read_bytes() != data]
    assert "000000000002" in str(changed)
    differing = [(a, b) for a, b in zip(before[changed], changed.read_bytes(), strict=True) if a != b]
    assert [(a ^ b) for a, b in differing] == [8]


def test_a_line_that_is_cut_is_a_black_hole_until_it_is_mended():
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line(server.getsockname())
        near = socket.create_connection(("127.0.0.1", line.port), timeout=10)
        far, _ = server.accept()
        far.settimeout(10)
        near.sendall(b"before")
        assert far.recv(100) == b"before"
        line.cut()
        near.sendall(b"into the hole")
        far.settimeout(0.2)
        with pytest.raises(TimeoutError):
            far.recv(100)
        line.mend()
        far.settimeout(10)
        assert far.recv(100) == b"into the hole"
        far.sendall(b"back")
        assert near.recv(100) == b"back"
        far.close()
        assert near.recv(100) == b""  # who hangs up is heard to
        near.close()
        line.close()
