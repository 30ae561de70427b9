"""Who is blamed when nothing moves: by counters alone, and on real processes that stop, spin, or wait for nobody."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.dist import run_ranks
from tests.recipe.small import small
from truestep.elastic import stacks
from truestep.elastic.watcher import HangWatch, lagging, observed
from truestep.errors import RecipeError
from truestep.recipe.load import load
from truestep.runlog import counters
from truestep.runlog.counters import Counters, SectionOf


def row(rank: int, **values: int) -> dict[str, int]:
    """A rank in the middle of step 5, waiting in its third collective."""
    usual = {"pid": 100 + rank, "step": 4, "section": SectionOf.COMPUTE, "microbatch": 1, "collective": 3, "inside": 1}
    return usual | {"rank": rank} | values


def rows(*changes: dict[str, int]) -> dict[int, dict[str, int]]:
    return {rank: row(rank, **change) for rank, change in enumerate(changes)}


@pytest.mark.parametrize(
    "found,rank,words",
    [
        (rows({}, {}, {"step": 3}), 2, "is behind"),
        (rows({"section": SectionOf.REDUCE}, {}, {"section": SectionOf.REDUCE}), 1, "in forward or backward in step 5"),
        (rows({}, {"section": SectionOf.DATA}, {}), 1, "waiting for its data in step 5"),
        (rows({}, {"inside": 0}, {}), 1, "is in no collective"),
        (rows({"cpu_percent": 3}, {"cpu_percent": 0}, {"cpu_percent": 30}), 2, "computes"),
        (rows({}, {}, {"microbatch": 0}), 2, "microbatch 0"),
        (rows({}, {"collective": 2}, {}), 1, "collective 2"),
        (rows({"step": 3}, {"stopped": 1}, {}), 1, "is stopped"),
        (rows({}, {"section": SectionOf.SAVE}, {"section": SectionOf.UPDATE}), 0, "in forward or backward"),
    ],
)
def test_the_rank_that_the_others_wait_for(found, rank, words):
    verdict = lagging(found)
    assert verdict.rank == rank and words in verdict.why


def test_nobody_is_named_without_evidence():
    assert lagging(rows({}, {}, {})).rank is None
    assert lagging(rows({"cpu_percent": 99}, {"cpu_percent": 99}, {"cpu_percent": 99})).rank is None
    assert lagging(rows({"step": 3}, {"step": 3}, {})).rank is None  # one of two, and nothing to tell them apart
    assert lagging(rows({}, {"microbatch": 0}, {}), alike=False).rank is None  # in a pipeline that means nothing
    assert lagging(rows({"inside": 0}, {"inside": 0}, {})).rank is None


def test_evidence_among_those_that_are_behind():
    assert lagging(rows({"step": 5}, {"inside": 0}, {})).rank == 1


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_hang_is_told_of_once_and_only_when_all_stand_still():
    clock = Clock()
    watch = HangWatch(5.0, now_s=clock)
    still = list(rows({}, {"step": 3}).values())
    assert watch.look(still, 2) is None
    clock.now_s = 4.9
    assert watch.look(still, 2) is None
    moved = [still[0], still[1] | {"microbatch": 2}]
    assert watch.look(moved, 2) is None  # one has moved
    clock.now_s = 9.8
    assert watch.look(moved, 2) is None
    clock.now_s = 10.0
    hang = watch.look(moved, 2)
    assert hang is not None and hang.verdict.rank == 1 and "for 5.1 s: rank 1 is behind" in hang.text
    clock.now_s = 20.0
    assert watch.look(moved, 2) is None  # told already
    assert watch.look([still[0], row(1, section=SectionOf.START)], 2) is None
    clock.now_s = 90.0
    assert watch.look([still[0], row(1, section=SectionOf.START)], 2) is None  # it only starts
    assert watch.look([still[0]], 2) is None  # the counters of one are missing


def test_hang_must_be_noticed_before_the_backend_ends_the_run():
    assert load(small(machine={"timeout": "2m"})).machine.hang_s == 60
    assert load(small(machine={"timeout": "2m", "elastic": {"hang": "20s"}})).machine.hang_s == 20
    with pytest.raises(RecipeError, match=r"machine.elastic.hang is no shorter than machine.timeout.*60s would do"):
        load(small(machine={"timeout": "2m", "elastic": {"hang": "5m"}}))


# On real processes


def _hanging(rank: int, world: int, folder: str, how: str) -> str:
    """Three ranks go through steps of a group; the victim goes astray in step 2. Rank 0 is the watcher's eye."""
    import torch
    import torch.distributed as dist

    from truestep.parallel.witness import Witness

    Witness(Path(folder) / "asked")
    mine = Counters(Path(folder) / "counters", rank, rank)
    other = dist.new_group([0, 2], use_local_synchronization=True) if how == "astray" and rank != 1 else None
    for step in range(10):
        mine.step(step)
        mine.enter(SectionOf.DATA)
        if step == 2 and rank == 1 and how == "data":
            threading.Event().wait()  # the user's own code
        mine.enter(SectionOf.COMPUTE)
        for index in range(2):
            mine.microbatch(index)
            if step == 2 and rank == 1 and index == 1:
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                while how == "spin":
                    pass
            if step == 2 and rank == 2 and index == 1 and how == "astray":
                dist.all_reduce(torch.ones(1), group=other)
            dist.all_reduce(torch.ones(4))  # as FSDP2's: uncounted
    return "never"


HANGS = {
    "stop": (1, "is stopped"),
    "spin": (1, "computes|has begun"),  # the other ranks of the test machine may leave it little of a processor
    "data": (1, "is behind: waiting for its data in step 3"),
    "astray": (2, "has begun"),
}


def _watch(folder: Path, told: list) -> None:
    """What a supervisor does."""
    eye, hang = HangWatch(0.4), None
    while hang is None:
        time.sleep(0.02)
        seen = observed([row for row in counters.read(folder / "counters") if row["pid"]])
        hang = eye.look(seen, 3) if all(row["step"] for row in seen) else None
    pids = {rank: row["pid"] for rank, row in hang.rows.items()}
    into = stacks.dump(pids, folder / "asked", folder / "dump")
    told.append((hang.verdict if hang.verdict.rank is not None else stacks.by_flight(into), into))
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", HANGS)
def test_real_ranks_that_hang_are_named(how, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    counters.make(tmp_path / "counters", 3)
    told: list = []
    watching = threading.Thread(target=_watch, args=(tmp_path, told))
    watching.start()
    with pytest.raises(RuntimeError, match="died without a word"):
        run_ranks(_hanging, 3, str(tmp_path), how, timeout_s=30)
    watching.join()
    ((verdict, into),) = told
    rank, words = HANGS[how]
    assert verdict.rank == rank and re.search(words, verdict.why), verdict
    texts = {number: (into / f"rank-{number}.txt").read_text() for number in range(3)}
    assert "_hanging" in texts[0] and "all_reduce" in texts[0]
    if how == "stop":
        assert "State:\tT" in texts[1] and "no stack" in texts[1]
    else:
        assert "_hanging" in texts[rank]
