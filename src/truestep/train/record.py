"""Where a stage's loop says what happens: in the run log, which rank 0 has, and to a person who looks on."""

import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from truestep.checkpoint.checkpointer import SaveResult
from truestep.checkpoint.upkeep import Kept
from truestep.runlog.log import RunLog
from truestep.runlog.metrics import RankMetrics
from truestep.runlog.outbox import take_in
from truestep.runlog.records import Decision, Fault
from truestep.sentinel.finite import Verdict
from truestep.train.evaluate import HeldOut
from truestep.train.state import TrainState
from truestep.train.step import StepResult

OUTBOX_EVERY_S = 1.0


class Watcher(Protocol):
    """Someone who looks on: progress on the terminal, sinks."""

    def step(self, stage: str, step: int, steps: int, result: StepResult, tokens: int, seconds: float) -> None: ...

    def held_out(self, stage: str, step: int, figures: HeldOut) -> None: ...

    def alarm(self, text: str) -> None: ...


@dataclass
class Recorder:
    """`log` is there on rank 0 only; everybody writes its own shard metrics."""

    stage: str
    metrics: RankMetrics
    log: RunLog | None = None
    watcher: Watcher | None = None
    _outbox_s: float = 0.0

    def note(self, kind: str, /, **values: Any) -> None:
        """A record of this stage."""
        if self.log:
            self.log.append(kind, stage=self.stage, **values)

    def alarm(self, text: str) -> None:
        if self.watcher:
            self.watcher.alarm(f"{self.stage}: {text}")

    def step(self, state: TrainState, result: StepResult, tokens: int, step_s: float, data_s: float) -> None:
        """A step that was done, be its update taken or not."""
        for index, (loss_sum, weight, norm) in enumerate(result.shards):
            self.metrics.append(self.stage, state.step, index, loss_sum, weight, norm)
        skipped = result.verdict is not Verdict.GO
        self.note(
            "step",
            step=state.step,
            tokens=tokens,
            targets=result.targets,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=state.optimizer.param_groups[0]["lr"],
            clip=result.clip,
            step_s=step_s,
            data_s=data_s,
            skipped=skipped,
            metrics=result.metrics,
        )
        if skipped:
            self.note("skip", step=state.step, reason=result.judgement.reason)
        if self.watcher:
            self.watcher.step(self.stage, state.step, state.steps, result, tokens, step_s)

    def fault(self, fault: Fault) -> None:
        """Something is wrong: a record, and a word to whoever looks on."""
        self.note("fault", **_given(fault))
        where = "" if fault.step is None else f"step {fault.step}: "
        self.alarm(f"{where}{fault.text}")

    def decision(self, decision: Decision) -> None:
        self.note("decision", **_given(decision))

    def held_out(self, step: int, figures: HeldOut, data: str | None, eval_s: float) -> None:
        self.note(
            "eval",
            step=step,
            data=data,
            loss=figures.loss,
            bits_per_byte=figures.bits_per_byte,
            bytes=figures.num_bytes or None,
            targets=figures.targets,
            method=figures.method,
            high_loss=figures.high_loss,
            metrics=figures.metrics or None,
            eval_s=eval_s,
        )
        if self.watcher:
            self.watcher.held_out(self.stage, step, figures)

    def saved(self, saved: SaveResult) -> None:
        self.note(
            "save",
            step=saved.step,
            ok=saved.ok,
            stall_s=saved.stall_s,
            total_s=saved.total_s,
            bytes=saved.num_bytes or None,
            manifest=saved.manifest_sha256 or None,
            error=saved.error or None,
        )
        if not saved.ok:
            self.alarm(f"saving step {saved.step} failed: {saved.error}")

    def kept(self, kept: Kept) -> None:
        """A checkpoint was read back, and retention done."""
        name = kept.committed.key
        if kept.damage:
            more = f" (and {len(kept.damage) - 1} more)" if len(kept.damage) > 1 else ""
            text = f"{name} is not as it was saved: {kept.damage[0]}{more}"
            self.fault(Fault(kind="checkpoint", text=text, step=kept.committed.step, evidence={"checkpoint": name}))
        if kept.retained:
            if kept.retained.deleted:
                freed, left = kept.retained.num_bytes, kept.retained.kept
                self.note("retention", deleted=kept.retained.deleted, bytes=freed, kept=left)
            for sentence in kept.retained.notes:
                self.alarm(sentence)
        if kept.error:
            self.alarm(f"{name} could not be verified, or older ones not be deleted: {kept.error}")

    def profile(self, step: int, found: Any, worst: list[float]) -> None:
        """What profiled steps show of this rank, and the largest communication and exposed seconds of all."""
        self.note(
            "profile",
            step=step,
            steps=found.steps,
            step_s=found.step_s,
            compute_s=found.compute_s,
            communication_s=found.all.communication_s,
            exposed_s=found.all.exposed_s,
            groups={name: asdict(exposure) for name, exposure in found.groups.items()},
            worst_communication_s=worst[0],
            worst_exposed_s=worst[1],
        )

    def take_in(self) -> None:
        """Events that others left for the log, about once a second."""
        if self.log and time.monotonic() - self._outbox_s >= OUTBOX_EVERY_S:
            self._outbox_s = time.monotonic()
            take_in(self.log.run_dir, self.log)


def _given(record: Fault | Decision) -> dict[str, Any]:
    """What is known of one, but for its stage."""
    return {name: value for name, value in vars(record).items() if value is not None and name != "stage"}
