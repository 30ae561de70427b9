"""What the supervisor does about a hang: it is named and written down, one rank or all are ended, the run goes on."""

import signal

import pytest

from tests.elastic.fakes import FakeMachine, ended, supervisor, waiting
from tests.elastic.test_supervisor import decisions, posted
from truestep.elastic import supervisor as module
from truestep.elastic.watcher import HangWatch
from truestep.runlog.counters import SectionOf


class Standing(FakeMachine):
    """Its ranks stand still in step 5 of their first start, rank 1 stopped, and are done at once in the next."""

    stopped = True

    def rows(self) -> list[dict[str, int]]:
        if len(self.starts) != 1:
            return []
        usual = {"step": 4, "section": int(SectionOf.COMPUTE), "microbatch": 0, "collective": 0, "inside": 0}
        ranks = [seat["rank"] for seat in self.starts[0]["ranks"]]
        return [usual | {"rank": rank, "pid": rank, "stopped": int(self.stopped and rank == 1)} for rank in ranks]


def script(machine, order):
    if order["do"] == "start" and len(machine.starts) == 2:
        return ended(order, 0)
    if order["do"] != "signal":
        return []
    first = machine.starts[0]
    killed = order["ranks"]
    others = [seat["rank"] for seat in first["ranks"] if seat["rank"] not in killed]
    return [*ended(first, dict.fromkeys(killed, -signal.SIGKILL)), *waiting(first, *others)]


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    return Standing("here", {"a": 1, "b": 1, "c": 1}, script)


def test_the_rank_that_is_named_is_ended_and_the_others_regroup(here, tmp_path):
    assert supervisor(tmp_path, here, hangs=HangWatch(0.0)).run().code == 0
    assert here.signals == [(signal.SIGKILL, [1])]
    (dump,) = [order["into"] for order in here.orders if order["do"] == "dump"]
    (fault,) = posted(tmp_path, "fault")
    assert (fault["kind"], fault["rank"], fault["host"], fault["named"]) == ("hang", 1, "b", True)
    assert "rank 1 is stopped" in fault["text"] and fault["evidence"]["stacks"] == dump
    assert fault["evidence"]["counters"]["1"]["step"] == 4
    assert decisions(tmp_path) == ["regroup"] and here.starts[1]["regroup"]


def test_where_nobody_is_named_all_are_ended_and_nobody_is_blamed(here, tmp_path):
    here.stopped = False
    assert supervisor(tmp_path, here, hangs=HangWatch(0.0)).run().code == 0
    assert here.signals == [(signal.SIGKILL, [0, 1, 2])]
    (fault,) = posted(tmp_path, "fault")
    assert (fault["kind"], fault["rank"], fault["host"], fault["named"]) == ("hang", None, None, False)
    assert decisions(tmp_path) == ["restart"] and len(here.starts[1]["ranks"]) == 3
