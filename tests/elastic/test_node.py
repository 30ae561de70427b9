"""A machine that takes part: when it gives up, and with whom it ends."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from truestep.elastic.agent import Agent
from truestep.elastic.lifeline import PIPE
from truestep.elastic.node import Node
from truestep.elastic.ports import LOOPBACK, free_port
from truestep.errors import UserError

from .runs import ENVIRONMENT, TIMEOUT_S


class Said:
    """A wire on which these orders come, and which breaks then."""

    silent_s = 0.0

    def __init__(self, *orders: dict[str, Any]):
        self.orders, self.broken = list(orders), None

    def received(self) -> list[dict[str, Any]]:
        orders, self.orders = self.orders, []
        self.broken = None if orders else "hung up"
        return orders

    def send(self, message: dict[str, Any]) -> None:
        return


@pytest.fixture
def agent():
    agent = Agent({"b": 1}, "torchrun", [])
    yield agent
    agent.close()


def follow(node: Node, agent: Agent, *orders: dict[str, Any]) -> bool:
    return node._follow(Said(*orders), agent)  # pyright: ignore[reportArgumentType]


def test_who_was_let_in_and_is_refused_tries_again(agent):
    """The supervisor has not noticed yet that the first connection broke."""
    node, refusal = Node("a:1", b""), {"do": "refuse", "why": "a host named b is here already"}
    with pytest.raises(UserError, match="refused this machine: a host named b"):
        follow(node, agent, refusal)
    assert not follow(node, agent, {"do": "beat"})
    assert not follow(node, agent, refusal)


def test_a_node_dies_with_whoever_holds_its_lifeline(tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef")
    lifeline, held = os.pipe()
    verb = ["node", f"{LOOPBACK}:{free_port()}", "--token-file", str(tmp_path / "token")]
    environment = ENVIRONMENT | {PIPE: str(lifeline)}
    node = subprocess.Popen([sys.executable, "-m", "truestep", *verb], env=environment, pass_fds=[lifeline])
    os.close(lifeline)
    os.close(held)
    assert node.wait(TIMEOUT_S) == -signal.SIGKILL
