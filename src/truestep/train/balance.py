"""What is done about a slow rank: its replica gets fewer microbatches, or its host leaves at the next checkpoint.

Whole replicas may differ in how much they do, since they meet once a step; the global batch stays what it is, and with
exact reductions so does every bit. A rank that shares weights with others (dp_shard, tp, cp, pp) holds all of them up,
and to give it alone fewer microbatches would leave them waiting for ever: if there are no other replicas, its host is
given up, where a supervisor can do without it. All ranks decide alike, from the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from truestep.errors import SUPERVISED, Again
from truestep.runlog.records import Decision, Fault
from truestep.train.pace import Pace, Window
from truestep.train.record import Recorder
from truestep.train.state import TrainState
from truestep.train.stragglers import Slow


class Feed(Protocol):
    """See data.loader.Prefetcher."""

    def restart(self, step: int) -> None: ...


@dataclass
class Balance:
    """`fewest`: processes that the run may go on with; `spares`: those held ready. `leave` is what to raise after the
    next checkpoint."""

    state: TrainState
    pace: Pace
    fewest: int
    spares: int
    environ: Mapping[str, str]
    leave: Again | None = None
    _named: dict[int, Slow] = field(default_factory=dict)

    def questions(self) -> list[float]:
        """For the step's agreement."""
        return self.pace.questions()

    def after(self, answers: Sequence[float], record: Recorder, feed: Feed) -> None:
        """Take the answers in, say what they show, and act on it from the next step on."""
        window = self.pace.take(answers)
        if window is None:
            return
        slow = {str(slow.rank): round(slow.against_others or slow.against_before or 0.0, 3) for slow in window.slow}
        record.note("sections", step=self.state.step, steps=window.steps, seconds=window.seconds, slow=slow)
        new = [slow for slow in window.slow if slow.rank not in self._named]
        self._named = {slow.rank: slow for slow in window.slow}
        for found in new:
            record.fault(self._fault(found, window))
        if self._deal(window, record):
            feed.restart(self.state.step)
        elif new and self.state.parallel.groups.degrees.dp_replicate == 1:
            self._give_up(new[0], record)

    def _fault(self, slow: Slow, window: Window) -> Fault:
        beside = {"that of ranks with equal work": slow.against_others, "its own before": slow.against_before}
        times = " and ".join(f"{ratio:.2f} times {what}" for what, ratio in beside.items() if ratio is not None)
        host = self.state.job.hosts[slow.rank]
        text = f"rank {slow.rank} on host {host} is slow: its time of a step is {times}"
        own = {name: values[slow.rank] for name, values in window.seconds.items()}
        evidence = {"against_others": slow.against_others, "against_before": slow.against_before, "seconds": own}
        return Fault(
            kind="straggler", text=text, step=self.state.step, rank=slow.rank, host=host, named=True, evidence=evidence
        )

    def _deal(self, window: Window, record: Recorder) -> bool:
        """Share microbatches out by the pace of replicas while one of them is slow, and evenly else."""
        shares, degrees = self.state.shares, self.state.parallel.groups.degrees
        if shares is None or degrees.dp_replicate == 1:
            return False
        pace_s = [1.0] * degrees.dp_replicate
        if window.slow:
            members: list[list[int]] = [[] for _ in pace_s]
            for rank in range(degrees.world):
                members[degrees.coordinate(rank).dp_replicate].append(rank)
            pace_s = [self.pace.stragglers.pace(ranks) for ranks in members]
        if not shares.deal(self.state.step, pace_s):
            return False
        counts = [shares.active(self.state.step, replica * shares.shards) for replica in range(shares.replicas)]
        who = ", ".join(f"rank {slow.rank}" for slow in window.slow)
        reason = f"{who} is slow" if who else "no rank is slow any more"
        text = f"{reason}: replicas now work on {', '.join(map(str, counts))} microbatches of a step"
        rank = window.slow[0].rank if window.slow else None
        record.decision(
            Decision(action="rebalance", reason=text, step=self.state.step, rank=rank, turns=list(shares.turns))
        )
        record.alarm(text)
        return True

    def _give_up(self, slow: Slow, record: Recorder) -> None:
        job = self.state.job
        host, left = job.hosts[slow.rank], job.world - job.hosts.count(job.hosts[slow.rank])
        if not self.environ.get(SUPERVISED) or left + self.spares < self.fewest or self.leave is not None:
            return record.alarm(f"rank {slow.rank} holds the others up, and nothing can take its place; replace {host}")
        reason = f"host {host} (rank {slow.rank}) is slow and is not used any more after the next checkpoint"
        record.alarm(reason)
        self.leave = Again(reason, (host,))
