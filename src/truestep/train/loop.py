"""The loop of a stage: loader → step → log → evaluation → checkpoint, until the last step or a polite stop."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Protocol

from truestep.checkpoint.checkpointer import Checkpointer
from truestep.errors import SUPERVISED, Again, UserError
from truestep.numerics.batch import Batch
from truestep.plan.interval import Interval
from truestep.recipe.checkpoint import Checkpoint
from truestep.runlog.counters import SectionOf
from truestep.runlog.log import RunLog
from truestep.runlog.metrics import RankMetrics
from truestep.runlog.records import Decision
from truestep.sentinel.alarm import Alarm
from truestep.train.balance import Balance
from truestep.train.evaluate import HeldOut
from truestep.train.first_checks import broken
from truestep.train.guard import Corruption, hosts_of
from truestep.train.memory import MemoryWatch
from truestep.train.profile import StepProfiler
from truestep.train.record import Recorder, Watcher
from truestep.train.saves import Saves
from truestep.train.state import TrainState
from truestep.train.step import StepResult, train_step
from truestep.train.stop import StopSignal


class Feed(Protocol):
    """Steps of data: (this rank's microbatches, targets of the global batch, tokens of the global batch)."""

    def __iter__(self) -> Iterator[tuple[int, list[Batch], int]]: ...

    def restart(self, step: int) -> None: ...


class Check(Protocol):
    """Looks at the state after every step. Its alarms are the same on all ranks, but for those that only tell."""

    def after(self, result: StepResult) -> Sequence[Alarm]: ...


class Rewinder(Protocol):
    """The way back to an earlier checkpoint of the stage."""

    def fence(self, not_after_step: int) -> Checkpointer:
        """Close the present checkpoints and let none of a later step count any more."""
        ...

    def go_back(self, left_out: tuple[int, int] | None) -> list[int]:
        """Restore state, loader and feed from the newest checkpoint that counts, or as they were at the beginning.
        `left_out`: steps whose rows are not read again; returns those rows, from the first to before the last."""
        ...


@dataclass
class Loop:
    """One stage's loop. `log` is there on rank 0 only; everybody writes its own shard metrics."""

    stage: str
    state: TrainState
    feed: Feed
    loader_state: Callable[[int], dict]
    tokens_of: Callable[[int], int]
    checkpointer: Checkpointer
    cadence: Checkpoint
    metrics: RankMetrics
    log: RunLog | None = None
    watcher: Watcher | None = None
    evaluate: Callable[[bool], HeldOut] | None = None
    evaluate_every: int = 0
    evaluate_data: str | None = None
    profiler: StepProfiler | None = None
    interval: Interval | None = None  # of saves, where it is learnt; on rank 0
    checks: Sequence[Check] = ()
    rewinder: Rewinder | None = None
    balance: Balance | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    figures: HeldOut | None = None

    def __post_init__(self) -> None:
        self.record = Recorder(self.stage, self.metrics, self.log, self.watcher)
        self.saves = Saves(self.state, self.checkpointer, self.cadence, self.record, self.interval)

    def run(self) -> str:
        """Train to the last step. Returns "done", or "stopped" after a polite stop; either way the state is saved."""
        state, counters = self.state, self.state.counters
        memory = MemoryWatch(state.parallel, state.job)
        with StopSignal() as stop:
            began = self._begin()
            for step, batches, num_targets in self.feed:
                fetched = time.perf_counter()
                questions = [float(stop.asked), float(state.job.first and self.saves.due())]
                questions += self.balance.questions() if self.balance else []
                try:
                    with self.profiler.step() if self.profiler else nullcontext():
                        result = train_step(state, batches, num_targets, questions)
                except Corruption as corruption:
                    self._corrupted(corruption)
                    began = self._begin()
                    continue
                counters.enter(SectionOf.OTHER)
                self._count(step, num_targets)
                now = time.perf_counter()
                self.record.step(state, result, self.tokens_of(step), now - began, fetched - began)
                if self.balance is not None:
                    self.balance.after(result.agreed[2:], self.record, self.feed)
                if self._rolled_back(self._alarms(result)):
                    began = self._begin()
                    continue
                if state.digests is not None:
                    state.digests.stepped(state.step)
                if self.profiler and self.profiler.finished:
                    self._end_profile()
                stopping, saving = (answer > 0 for answer in result.agreed[:2])
                if found := memory.after_step(last=stopping or state.step == state.steps):
                    self.record.note("memory", step=state.step, **asdict(found))
                if self.evaluate_every and state.step % self.evaluate_every == 0 and state.step < state.steps:
                    self.held_out(last=False)
                if saving or self.saves.due_by_step():
                    leave = self.balance.leave if self.balance else None
                    self.save(wait=leave is not None)
                    if leave is not None:
                        raise leave
                self.saves.settle()
                self.record.take_in()
                if stopping and state.step < state.steps:
                    self._end_profile()
                    self.save(wait=True)
                    return "stopped"
                began = self._begin()
        self._end_profile()
        if self.evaluate is not None:
            self.held_out(last=True)
        self.save(wait=True)
        return "done"

    def held_out(self, *, last: bool) -> None:
        """Evaluate; the last time on all held-out rows."""
        assert self.evaluate is not None
        self.state.counters.enter(SectionOf.EVALUATE)
        began = time.perf_counter()
        self.figures = self.evaluate(last)
        self.record.held_out(self.state.step, self.figures, self.evaluate_data, time.perf_counter() - began)

    def save(self, *, wait: bool) -> None:
        """Start a save (and wait for it). A step that is saved already is not saved again."""
        self.state.counters.enter(SectionOf.SAVE)
        self.saves.save(wait=wait)

    def roll_back(
        self,
        reason: str,
        *,
        left_out: tuple[int, int] | None = None,
        not_after_step: int | None = None,
        without: Iterable[str] = (),
    ) -> None:
        """Go on from the newest checkpoint of at most `not_after_step` steps (by default, the newest). All ranks call
        this together, alike. No later checkpoint will ever count again.

        `left_out`: steps, from the first (counted from 0) to before the last, whose data is not to be read again.
        `without`: hosts to do without. Where a supervisor can see to that, Again is raised instead of going back here.
        """
        state, began = self.state, time.monotonic()
        step, skips, rollbacks, hosts = state.step, state.spikes.skips, state.spikes.rollbacks, tuple(without)
        if self.rewinder is None:
            raise UserError(f"stage {self.stage!r}, step {step}: {reason}; nothing is there to roll back to")
        state.parallel.zero_grad()
        state.parallel.probe.take()
        self.saves.checkpointer.wait()
        self.saves.settle()
        self.saves.replace(self.rewinder.fence(step if not_after_step is None else not_after_step))
        if hosts and self.environ.get(SUPERVISED):
            for host in hosts:
                self.record.decision(Decision(action="quarantine", reason=reason, step=step, host=host))
            raise Again(reason, hosts)
        rows = self.rewinder.go_back(left_out)
        if left_out:
            state.spikes.rolled_back(state.step, skips, rollbacks)
        if self.interval is not None:
            self.interval.failed()
        seconds = time.monotonic() - began
        self.record.decision(
            Decision(action="roll back", reason=reason, step=step, to_step=state.step, left_out=rows, seconds=seconds)
        )
        words = f"without rows {rows[0]} to {rows[1] - 1} of the data" if rows else "with the same data"
        self.record.alarm(f"rolled back from step {step} to step {state.step}, {words}: {reason}")
        for host in hosts:
            self.record.alarm(f"replace host {host}: {reason}")
        if left_out:
            self.save(wait=False)  # what is left out holds from now on, also if the run is killed before the next save

    def _begin(self) -> float:
        self.state.counters.step(self.state.step)
        self.state.counters.enter(SectionOf.DATA)
        return time.perf_counter()

    def _alarms(self, result: StepResult) -> list[Alarm]:
        state = self.state
        spikes = state.spikes.alarms(state.step - 1, result.judgement)
        shards = state.statistics.alarms(state.step) if state.statistics else []
        if shards and state.guard is not None:
            state.guard.suspect()
        return [*spikes, *shards, *(alarm for check in self.checks for alarm in check.after(result))]

    def _rolled_back(self, alarms: Sequence[Alarm]) -> bool:
        """Say what was found, and do about it what is to be done: end, or roll back, as far as the first needs it."""
        for alarm in alarms:
            self.record.fault(alarm.fault)
        for alarm in alarms:
            if alarm.action == "halt":
                raise UserError(f"stage {self.stage!r}, step {alarm.fault.step}: {alarm.fault.text}")
        backs = [alarm for alarm in alarms if alarm.action == "roll back"]
        if not backs:
            return False
        since = min(alarm.fault.since or 0 for alarm in backs)
        left_out = next((alarm.left_out for alarm in backs if alarm.left_out), None)
        reason = "; ".join(alarm.fault.text for alarm in backs)
        self.roll_back(
            reason, left_out=left_out, not_after_step=since - 1, without=hosts_of([alarm.fault for alarm in backs])
        )
        return True

    def _corrupted(self, found: Corruption) -> None:
        for fault in found.faults:
            self.record.fault(fault)
        if any(fault.kind == "host" for fault in found.faults) and not self.environ.get(SUPERVISED):
            raise broken(str(found))  # the same device would fail its next test as well
        self.roll_back(str(found), not_after_step=found.since - 1, without=hosts_of(found.faults))

    def _count(self, step: int, num_targets: int) -> None:
        state = self.state
        state.tokens += self.tokens_of(step)
        state.targets += num_targets
        state.loader = self.loader_state(state.step)

    def _end_profile(self) -> None:
        """Record what profiled steps show, if there were any: of this rank, and the worst over all."""
        if self.profiler is None:
            return
        found, self.profiler = self.profiler.close(), None
        if found is not None:
            worst = self.state.job.all_max([found.all.communication_s, found.all.exposed_s])
            self.record.profile(self.state.step, found, worst)
