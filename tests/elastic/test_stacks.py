"""Stacks and last collectives of real processes, by whatever is installed; a rank that does not answer is said to."""

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from truestep.elastic import stacks


def lines(folder: Path, *ranks: tuple[int, dict[str, int]], p2p: bool = False) -> None:
    """Flight records: rank -> collectives begun, by group."""
    for rank, groups in ranks:
        entries = [
            {"is_p2p": p2p, "process_group": [group, "of a mesh"], "collective_seq_id": number}
            for group, most in groups.items()
            for number in range(1, most + 1)
        ]
        (folder / f"rank-{rank}.flight").write_text(json.dumps({"gloo": {"entries": entries}}))


def test_the_rank_that_has_not_begun_what_the_others_have(tmp_path):
    lines(tmp_path, (0, {"world": 7, "shard": 4}), (1, {"world": 7, "shard": 4}), (2, {"world": 6}))
    verdict = stacks.by_flight(tmp_path)
    assert verdict.rank == 2 and verdict.why == "has begun 6 collectives of group world (gloo), the others 7"


def test_nobody_where_two_are_behind_or_none_or_only_messages_between_two_differ(tmp_path):
    lines(tmp_path, (0, {"world": 7}), (1, {"world": 6}), (2, {"world": 6}))
    assert stacks.by_flight(tmp_path).rank is None
    lines(tmp_path, (0, {"world": 7}), (1, {"world": 7}), (2, {"world": 7}))
    assert stacks.by_flight(tmp_path).rank is None
    lines(tmp_path, (0, {"pp": 7}), (1, {"pp": 6}), (2, {"pp": 7}), p2p=True)
    assert stacks.by_flight(tmp_path).rank is None
    assert stacks.by_flight(tmp_path / "empty").rank is None


@pytest.fixture
def sleeper():
    before = signal.signal(stacks.SIGNAL, signal.SIG_IGN)  # handed on by the fork: the child may be asked at once
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    signal.signal(stacks.SIGNAL, before)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_process_that_does_not_answer(tmp_path, sleeper, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(stacks, "WAIT_S", 0.2)
    into = stacks.dump({3: sleeper, 4: 2**22 + 1}, tmp_path / "asked", tmp_path / "into")
    text = (into / "rank-3.txt").read_text()
    assert f"Pid:\t{sleeper}" in text and "State:\tS" in text and "no stack" in text
    assert "no stack" in (into / "rank-4.txt").read_text()  # there is no such process
    assert not (tmp_path / "asked" / stacks.ASK).exists()


def test_py_spy_is_asked_where_it_is_installed(tmp_path, sleeper, monkeypatch):
    spy = tmp_path / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text('#!/bin/sh\necho "Thread 1 (idle): stacks of $3"\n')
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{spy.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(stacks, "WAIT_S", 0.1)
    into = stacks.dump({0: sleeper}, tmp_path / "asked", tmp_path / "into")
    assert f"stacks of {sleeper}" in (into / "rank-0.txt").read_text()
