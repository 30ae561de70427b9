"""A stage goes back to an earlier checkpoint in place: live state, loader and feed, by all ranks together."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import load_newest
from truestep.data.loader import Prefetcher
from truestep.errors import CheckpointError
from truestep.imports import is_import_path
from truestep.numerics.fixed_point import UNKNOWN
from truestep.stages.assemble import Parts
from truestep.stages.context import Context
from truestep.stages.resume import open_checkpoints


@dataclass
class StageRewinder:
    """`checkpointer`: the present one, `times`: how often the stage has gone back in this attempt."""

    context: Context
    parts: Parts
    feed: Prefetcher
    checkpointer: Checkpointer
    times: int = 0

    def fence(self, not_after_step: int) -> Checkpointer:
        """Close the present checkpoints and let none of a later step count any more. What is saved from here on is of a
        new epoch, so that a step can be saved once more."""
        self.times += 1
        self.checkpointer.close()
        self.checkpointer = open_checkpoints(self.context, self.parts.stage, self.times, not_after_step)
        return self.checkpointer

    def go_back(self, left_out: tuple[int, int] | None) -> list[int]:
        """See train.loop.Rewinder."""
        state, loader, job = self.parts.state, self.parts.loader, self.context.job
        rows = self._rows(left_out)
        self.feed.close()  # it reads ahead by what the loader says
        deadline_s = self.context.recipe.checkpoint.deadline
        group = Group.of(job.store, job.rank, job.world, deadline_s, "roll-back", job.lost)
        loaded = load_newest(self.checkpointer.store, state.tensors(), group=group, attempt=self.checkpointer.attempt)
        if loaded is None:
            begin_anew(self.parts)
            state.restore(self.parts.first | {"parent": state.parent})
        else:
            if state.base is not None:
                fill(self.parts, state.parallel.frozen)
            state.restore(loaded.extra)
            if self.checkpointer.upkeep:
                self.checkpointer.upkeep.went_on_from(loaded.commit)
            for sentence in loaded.fell_back:
                self.context.progress.alarm(sentence)
        next_row = loader.go_back(state.loader, rows)
        state.loader = loader.state(next_row)
        self.feed.restart(state.step)
        return list(rows or ())

    def _rows(self, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        """The global rows of steps, from the first to before the last."""
        if steps is None:
            return None
        (start, _), (_, stop) = (self.parts.schedule.rows(step) for step in (steps[0], steps[1] - 1))
        first, last = (int(self.parts.loader.global_rows(row, row + 1)[0]) for row in (start, stop - 1))
        return first, last + 1


def begin_anew(parts: Parts) -> None:
    """Weights and optimizer as they were before the first step. What else there is, the caller restores."""
    state = parts.state
    if is_import_path(state.section.kind):
        raise CheckpointError(
            f"stage {parts.stage.name!r} has no checkpoint to go back to, and how {state.section.kind} begins is known "
            f"to nobody but itself; save more often (checkpoint.every), and start the run anew"
        )
    fill(parts, set(state.parallel.pieces()))
    with torch.no_grad():
        for value in state.optimizer.named_state().values():
            value.zero_()
        if state.exact is not None:
            state.exact.exponents.fill_(UNKNOWN)


def fill(parts: Parts, names: Collection[str]) -> None:
    """Give these parameters and buffers the values that they had before the first step."""
    pieces = parts.state.parallel.pieces()
    with torch.no_grad():
        for part in parts.state.parallel.parts:
            own = {name for name, _ in (*part.named_parameters(), *part.named_buffers())} & set(names)
            parts.fill(part, {name: piece for name, piece in pieces.items() if name in own})
