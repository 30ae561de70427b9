"""How long each section of a step takes on each rank, and which rank holds the others up.

In lockstep all ranks seem equally slow: those that are ready wait inside the forward and backward passes of FSDP2. So a
rank's own time is taken where nobody waits: in the forward passes of its blocks, between what FSDP2 gathers before and
what it frees after (a backward pass costs twice a forward one), in its update, and in its wait for data. On a CPU that
is the clock's time of every step; on a GPU, events of one step in a window, read when the device is through with them.

The numbers of all ranks travel in the step's one agreement, about every EVERY steps or EVERY_S seconds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from truestep.runlog.counters import NAMES
from truestep.sentinel.statistics import apart
from truestep.train.state import TrainState
from truestep.train.stragglers import Slow, Stragglers

EVERY, EVERY_S = 50, 30.0
FORWARDS = 3
"""Forward passes that forward and backward together cost."""
_COLUMNS = (*NAMES, "waited", "own")


@dataclass(frozen=True)
class Window:
    """Means a step of the steps since the last one, by rank; and the ranks that are slow by now."""

    steps: int
    seconds: dict[str, list[float]]
    slow: list[Slow]


class BlockTimer:
    """Seconds in the forward passes of blocks in training. `compiled` blocks are not timed: hooks would break their
    graphs."""

    def __init__(self, parts: Sequence[nn.Module], device: torch.device, compiled: bool = False):
        self._cuda, self._on = device.type == "cuda", device.type != "cuda"
        self._since: Any = None
        self._spent_s, self._calls = 0.0, 0
        self._events: list[tuple[Any, Any]] = []
        blocks = [] if compiled else [block for part in parts for block in part.blocks]  # pyright: ignore[reportGeneralTypeIssues]
        self.num_blocks = len(blocks)
        for block in blocks:
            # FSDP2's own hooks lie around these: it puts its first in front, and its last behind
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end, prepend=True)

    def sample(self, on: bool) -> None:
        """Whether the next step is one to be timed. On a CPU all are."""
        self._on = on or not self._cuda

    def take(self) -> float | None:
        """Mean seconds of one microbatch through this rank's blocks since the last call; None where nothing was timed.
        On a GPU: after something that waited for the step."""
        for begun, ended in self._events:
            self._spent_s += begun.elapsed_time(ended) / 1e3
        spent_s, calls = self._spent_s, self._calls
        self._spent_s, self._calls = 0.0, 0
        self._events.clear()
        return spent_s / calls * self.num_blocks if calls else None

    def _begin(self, block: nn.Module, inputs: Any) -> None:
        self._since = self._now() if self._on and block.training else None

    def _end(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if self._since is None:
            return
        if self._cuda:
            self._events.append((self._since, self._now()))
        else:
            self._spent_s += self._now() - self._since
        self._calls += 1
        self._since = None

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class Pace:
    """`questions` before a step, `take` with the answers after it."""

    state: TrainState
    blocks: BlockTimer
    stragglers: Stragglers
    _phase: int = 0  # 1: the next step is one to be timed on a GPU; 2: the next step's agreement carries the numbers
    _steps: int = 0
    _began_s: float = field(default_factory=time.monotonic)
    _before: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, state: TrainState, compiled: bool) -> "Pace":
        """Ranks of one pipeline stage have equal work."""
        degrees = state.parallel.groups.degrees
        classes = [degrees.coordinate(rank).pp for rank in range(degrees.world)]
        timer = BlockTimer(state.parallel.parts, state.parallel.device, compiled)
        return cls(state, timer, Stragglers(classes), _before=state.counters.spent_s())

    def questions(self) -> list[float]:
        """Numbers for the step's agreement: whether a window is over, which rank 0 says, and those of one that was."""
        job = self.state.job
        over = self._steps + 1 >= EVERY or time.monotonic() - self._began_s >= EVERY_S
        ripe = float(job.first and over and self._phase == 0)
        return [ripe, *(apart(self._numbers(), job.rank, job.world) if self._phase == 2 else [])]

    def take(self, answers: Sequence[float]) -> Window | None:
        """What the answers to `questions` hold."""
        ripe, *rest = answers
        self._steps += 1
        window = self._window(rest) if self._phase == 2 else None
        self._phase = {0: int(ripe > 0), 1: 2, 2: 0}[self._phase]
        self.blocks.sample(self._phase == 1)
        return window

    def _window(self, numbers: list[float]) -> Window:
        table_RN = np.reshape(numbers, (self.state.job.world, len(_COLUMNS)))
        seconds = {name: table_RN[:, at].round(6).tolist() for at, name in enumerate(_COLUMNS)}
        steps, own_R = max(1, self._steps - 1), seconds["own"]
        slow = self.stragglers.look(own_R) if all(own > 0 for own in own_R) else []
        self._steps, self._began_s, self._before = 0, time.monotonic(), self.state.counters.spent_s()
        return Window(steps, seconds, slow)

    def _numbers(self) -> list[float]:
        """Of this rank, means a step, before the step that brings them."""
        steps, spent_s = max(1, self._steps), self.state.counters.spent_s()
        means = {name: (spent_s[name] - self._before[name]) / steps for name in spent_s}
        through_s = self.blocks.take()
        own_s = 0.0
        if through_s is not None:
            own_s = FORWARDS * through_s * self._microbatches() + means["update"] + means["data"]
        return [*(means[name] for name in _COLUMNS[:-1]), own_s]

    def _microbatches(self) -> float:
        """That a rank has in a step if all have equally many."""
        shares = self.state.shares
        return shares.count(self.state.step) / (shares.replicas * shares.shards) if shares is not None else 1.0
