"""The agent of one machine, over workers that pretend: what it tells of them, and what it tells them."""

from collections.abc import Iterator
from typing import Any

import pytest

from truestep.elastic import agent as module
from truestep.elastic.agent import Agent
from truestep.elastic.keeper import Keeper
from truestep.elastic.starts import Ended
from truestep.runlog import counters
from truestep.storage.keeper import ADDRESS, TOKEN


class Pretended:
    """Workers that live until `over` says that they ended."""

    def __init__(self, arguments: list[str]):
        self.works: list[Any] = []
        self.over: list[Ended] = []

    def start(self, works, nodes):
        self.works += works

    def signal(self, number, signal_number):
        return

    def ends(self):
        over, self.over = self.over, []
        return over

    def pids(self):
        return {work.number: work.number for work in self.works}

    def close(self):
        return


@pytest.fixture
def agent(monkeypatch) -> Iterator[Agent]:
    monkeypatch.setitem(module.STARTS, "fork", Pretended)
    monkeypatch.delenv(counters.VARIABLE, raising=False)
    agent = Agent({"a": 1, "b": 1, "c": 1}, "fork", [], regroup=True)
    yield agent
    agent.close()


def order(*hosts: str, mine: str = "127.0.0.1", alone: bool = True, **variables: str) -> dict[str, Any]:
    ranks = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
    where = {"node": 0, "nodes": 1, "address": mine, "port": 4711, "mine": mine, "alone": alone}
    start = {"do": "start", "serial": 1, "ranks": ranks, "world": len(hosts), "regroup": False}
    return start | where | {"variables": variables}


def works(agent: Agent) -> list[Any]:
    assert isinstance(agent._start, Pretended)
    return agent._start.works


def test_the_step_of_a_rank_is_not_that_of_who_had_the_rank_before(agent):
    """Rank 1 died in step 6 on its slot; another, in the next slot, has the number now."""
    agent.follow(order("a", "b", "c"))
    counted = agent._counters
    counters.Counters(counted, 1, rank=1).step(6)
    counters.Counters(counted, 2, rank=1).step(9)
    assert isinstance(agent._start, Pretended)
    agent._start.over = [Ended(2, 70)]
    assert [(event["rank"], event["step"]) for event in agent.events()] == [(1, 9)]


@pytest.mark.parametrize("alone, everywhere", [(True, False), (False, True)])
def test_a_keeper_can_be_reached_by_whoever_may_join(agent, alone, everywhere, monkeypatch):
    """Its first group is on one machine, the next is not."""
    listens = []
    monkeypatch.setattr(module, "Keeper", lambda token, host: listens.append(host) or Keeper(token, host, 1000))
    agent.follow(order("a", alone=alone, **{TOKEN: "secret"}))
    first = works(agent)[0].variables[ADDRESS]
    assert first.startswith("127.0.0.1:") and (listens == [""]) is everywhere
    later = agent._place(agent._workers[1], order("a", mine="10.0.0.7", alone=alone, **{TOKEN: "secret"}))
    assert later["keeper"] == first.replace("127.0.0.1", "10.0.0.7") and len(listens) == 1


def test_without_a_token_there_is_no_keeper(agent):
    agent.follow(order("a"))
    assert ADDRESS not in works(agent)[0].variables and agent._place(agent._workers[1], order("a"))["keeper"] is None
