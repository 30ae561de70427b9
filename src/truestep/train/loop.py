"""The loop of a stage: loader → step → log → evaluation → checkpoint, until the last step or a polite stop."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Protocol

from truestep.checkpoint.checkpointer import Checkpointer, SaveResult
from truestep.errors import UserError
from truestep.numerics.batch import Batch
from truestep.plan.interval import Interval
from truestep.recipe.checkpoint import Checkpoint
from truestep.runlog.log import RunLog
from truestep.runlog.metrics import RankMetrics
from truestep.sentinel.finite import Verdict
from truestep.train.evaluate import HeldOut
from truestep.train.memory import MemoryUse, MemoryWatch
from truestep.train.profile import StepProfiler
from truestep.train.state import TrainState
from truestep.train.step import StepResult, train_step
from truestep.train.stop import StopSignal


class Feed(Protocol):
    """Steps of data: (this rank's microbatches, targets of the global batch, tokens of the global batch)."""

    def __iter__(self) -> Iterator[tuple[int, list[Batch], int]]: ...


class Watcher(Protocol):
    """Someone who looks on: progress on the terminal, sinks."""

    def step(self, stage: str, step: int, steps: int, result: StepResult, tokens: int, seconds: float) -> None: ...

    def held_out(self, stage: str, step: int, figures: HeldOut) -> None: ...

    def alarm(self, text: str) -> None: ...


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
    failures: int = 0
    figures: HeldOut | None = None
    _saved_at: float = field(default_factory=time.monotonic)
    _saved_step: int = -1

    def run(self) -> str:
        """Train to the last step. Returns "done", or "stopped" after a polite stop; either way the state is saved."""
        state = self.state
        memory = MemoryWatch(state.parallel, state.job)
        with StopSignal() as stop:
            began = time.perf_counter()
            for step, batches, num_targets in self.feed:
                fetched = time.perf_counter()
                due = state.job.first and self._due()
                with self.profiler.step() if self.profiler else nullcontext():
                    result = train_step(state, batches, num_targets, [float(stop.asked), float(due)])
                self._count(step, num_targets)
                ended = time.perf_counter()
                self._record(step, result, ended - began, fetched - began)
                if state.digests is not None:
                    state.digests.stepped(state.step)
                if self.profiler and self.profiler.finished:
                    self._end_profile()
                stopping, saving = (answer > 0 for answer in result.agreed)
                self._say_memory(memory.after_step(last=stopping or state.step == state.steps))
                if self.evaluate_every and state.step % self.evaluate_every == 0 and state.step < state.steps:
                    self.held_out(last=False)
                if saving or self._due_by_step():
                    self.save(wait=False)
                self._settle()
                if stopping and state.step < state.steps:
                    self._end_profile()
                    self.save(wait=True)
                    return "stopped"
                began = time.perf_counter()
        self._end_profile()
        if self.evaluate is not None:
            self.held_out(last=True)
        self.save(wait=True)
        return "done"

    def _end_profile(self) -> None:
        """Record what profiled steps show, if there were any: of this rank, and the worst over all."""
        if self.profiler is None:
            return
        found, self.profiler = self.profiler.close(), None
        if found is None:
            return
        worst = self.state.job.all_max([found.all.communication_s, found.all.exposed_s])
        if self.log:
            self.log.append(
                "profile",
                stage=self.stage,
                step=self.state.step,
                steps=found.steps,
                step_s=found.step_s,
                compute_s=found.compute_s,
                communication_s=found.all.communication_s,
                exposed_s=found.all.exposed_s,
                groups={name: asdict(exposure) for name, exposure in found.groups.items()},
                worst_communication_s=worst[0],
                worst_exposed_s=worst[1],
            )

    def _say_memory(self, found: MemoryUse | None) -> None:
        if found is not None and self.log:
            self.log.append("memory", stage=self.stage, step=self.state.step, **asdict(found))

    def held_out(self, *, last: bool) -> None:
        """Evaluate; the last time on all held-out rows."""
        assert self.evaluate is not None
        began = time.perf_counter()
        self.figures = self.evaluate(last)
        if self.log:
            self.log.append(
                "eval",
                stage=self.stage,
                step=self.state.step,
                data=self.evaluate_data,
                loss=self.figures.loss,
                bits_per_byte=self.figures.bits_per_byte,
                bytes=self.figures.num_bytes or None,
                targets=self.figures.targets,
                method=self.figures.method,
                high_loss=self.figures.high_loss,
                eval_s=time.perf_counter() - began,
            )
        if self.watcher:
            self.watcher.held_out(self.stage, self.state.step, self.figures)

    def save(self, *, wait: bool) -> None:
        """Start a save (and wait for it). A step that is saved already is not saved again."""
        if self._saved_step != self.state.step:
            self._saved_step = self.state.step
            self._saved_at = time.monotonic()
            self.metrics.flush()
            extra = self.state.extra() | (self.state.digests.for_save(self.state.step) if self.state.digests else {})
            self.checkpointer.save(
                self.state.step, self.state.tensors(), extra, asynchronous=self.cadence.asynchronous
            )
        if wait:
            self.checkpointer.wait()
            self._settle(last=True)

    def _due(self) -> bool:
        since_s, every_s = time.monotonic() - self._saved_at, self.cadence.every_time
        if every_s == "auto":
            under_way = self.checkpointer.pending is not None and not self.checkpointer.pending.done()
            return self.interval is not None and self.interval.due(since_s) and not under_way
        return bool(every_s) and since_s >= every_s

    def _due_by_step(self) -> bool:
        return bool(self.cadence.every) and self.state.step % self.cadence.every == 0

    def _settle(self, last: bool = False) -> None:
        """Take in what became of saves: log each, alarm on failures, stop at the stated limit."""
        for saved in self.checkpointer.finished():
            self.failures = 0 if saved.ok else self.failures + 1
            if saved.ok and self.interval:
                self.interval.saved(saved.stall_s, saved.total_s)
                if self.log and (news := self.interval.news()):
                    self.log.append("note", text=f"{self.stage}: {news}")
            if self.log:
                self.log.append(
                    "save",
                    stage=self.stage,
                    step=saved.step,
                    ok=saved.ok,
                    stall_s=saved.stall_s,
                    total_s=saved.total_s,
                    bytes=saved.num_bytes or None,
                    manifest=saved.manifest_sha256 or None,
                    error=saved.error or None,
                )
            if self.watcher and not saved.ok:
                self.watcher.alarm(f"{self.stage}: saving step {saved.step} failed: {saved.error}")
            if not saved.ok and (self.failures > self.cadence.max_failures or last):
                raise UserError(_failed(saved, self.failures))

    def _count(self, step: int, num_targets: int) -> None:
        state = self.state
        state.tokens += self.tokens_of(step)
        state.targets += num_targets
        state.loader = self.loader_state(state.step)

    def _record(self, step: int, result: StepResult, step_s: float, data_s: float) -> None:
        state, tokens = self.state, self.tokens_of(step)
        for index, (loss_sum, weight, norm) in enumerate(result.shards):
            self.metrics.append(self.stage, state.step, index, loss_sum, weight, norm)
        if result.verdict is Verdict.HALT:
            raise UserError(
                f"stage {self.stage!r}, step {step}: loss {result.loss} and gradient norm {result.grad_norm} are not "
                f"finite, so the step was not taken; lower the learning rate or look at the data of this step "
                f"(checkpoints up to here are sound)"
            )
        if self.log:
            self.log.append(
                "step",
                stage=self.stage,
                step=state.step,
                tokens=tokens,
                targets=result.targets,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=state.optimizer.param_groups[0]["lr"],
                clip=result.clip,
                step_s=step_s,
                data_s=data_s,
                skipped=result.verdict is Verdict.SKIP,
                metrics=result.metrics,
            )
        if self.watcher:
            self.watcher.step(self.stage, state.step, state.steps, result, tokens, step_s)


def _failed(saved: SaveResult, failures: int) -> str:
    return (
        f"saving step {saved.step} failed ({saved.error}), {failures} in a row; free space or fix access to the store "
        f"and run the same command again: it goes on from the newest good checkpoint"
    )
