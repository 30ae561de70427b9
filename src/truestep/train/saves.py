"""Checkpoints of a loop: when one is due, what became of each, and how many may fail."""

import time

from truestep.checkpoint.checkpointer import Checkpointer, SaveResult
from truestep.errors import UserError
from truestep.plan.interval import Interval
from truestep.recipe.checkpoint import Checkpoint
from truestep.train.record import Recorder
from truestep.train.state import TrainState


class Saves:
    """`interval`: how often, where that is learnt; on rank 0, which decides about time."""

    def __init__(
        self,
        state: TrainState,
        checkpointer: Checkpointer,
        cadence: Checkpoint,
        record: Recorder,
        interval: Interval | None,
    ):
        self.checkpointer, self.failures = checkpointer, 0
        self._state, self._cadence, self._record, self._interval = state, cadence, record, interval
        self._saved_s, self._saved_step = time.monotonic(), -1

    def due(self) -> bool:
        """Whether enough time has passed since the last one began."""
        since_s, every_s = time.monotonic() - self._saved_s, self._cadence.every_time
        if every_s == "auto":
            pending = self.checkpointer.pending
            under_way = pending is not None and not pending.future.done()
            return self._interval is not None and self._interval.due(since_s) and not under_way
        return bool(every_s) and since_s >= every_s

    def due_by_step(self) -> bool:
        return bool(self._cadence.every) and self._state.step % self._cadence.every == 0

    def save(self, *, wait: bool) -> None:
        """Start a save (and wait for it). A step that is saved already is not saved again; one whose save failed is
        tried once more if it is waited for."""
        if wait:
            self.checkpointer.wait()
            self.settle()
        if self._saved_step != self._state.step:
            self._saved_step = self._state.step
            self._saved_s = time.monotonic()
            state, metrics, asynchronous = self._state, self._record.metrics, self._cadence.asynchronous
            tensors, unchanged = state.tensors(), state.until_update()
            self.checkpointer.save(
                state.step, tensors, state.extra(), asynchronous, unchanged=unchanged, first=metrics.flushing()
            )
            state.before_update = self.checkpointer.release
        if wait:
            self.checkpointer.wait()
            self.settle(last=True)

    def settle(self, *, last: bool = False) -> None:
        """Take in what became of saves: log each, alarm on failures, stop at the stated limit."""
        ended = self.checkpointer.finished()
        for saved in ended:
            self.failures = 0 if saved.ok else self.failures + 1
            if saved.ok and self._interval:
                self._interval.saved(saved.stall_s, saved.total_s)
                if (news := self._interval.news()) and self._record.log:
                    self._record.log.append("note", text=f"{self._record.stage}: {news}")
            if saved.ok and self.checkpointer.upkeep:
                self.checkpointer.upkeep.after(saved.commit)
            self._record.saved(saved)
            if saved.ok and self._state.digests is not None:
                self._state.digests.saved(saved.step, saved.fingerprints)
            if not saved.ok and saved.step == self._saved_step:
                self._saved_step = -1
            if saved.superseded:
                raise UserError(f"step {saved.step} was not saved, since another attempt has taken over: {saved.error}")
            if not saved.ok and (self.failures > self._cadence.max_failures or (last and saved is ended[-1])):
                raise UserError(_failed(saved, self.failures))
        self._take_upkeep()

    def close(self) -> None:
        """Wait for the last save, and a while for its upkeep."""
        self.checkpointer.close()
        if self.checkpointer.upkeep:
            self.checkpointer.upkeep.close()
            self._take_upkeep()

    def _take_upkeep(self) -> None:
        if self.checkpointer.upkeep:
            for kept in self.checkpointer.upkeep.finished():
                self._record.kept(kept)

    def replace(self, checkpointer: Checkpointer) -> None:
        """Go on with another one, which has saved nothing yet. The one before is closed."""
        self.close()
        self.checkpointer, self._saved_step = checkpointer, -1


def _failed(saved: SaveResult, failures: int) -> str:
    return (
        f"saving step {saved.step} failed ({saved.error}), {failures} in a row; free space or fix access to the store "
        f"and run the same command again: it goes on from the newest good checkpoint"
    )
