"""Fingerprints of whole gradients and states, over all ranks: taken at some steps and at every save, and logged. Those
of a save come from the checkpointer, which takes them beside the training.

They are the same on every mesh that computes the same bits, so another job can show later, on other processes, whether
a step came out as it did here (`truestep replay`), and a restore whether it holds what was saved (`truestep drill`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from truestep.numerics.fingerprint import combined, fingerprints
from truestep.numerics.pieces import Piece
from truestep.parallel.job import Job
from truestep.runlog.log import RunLog

if TYPE_CHECKING:  # a step needs nothing of the files that rows go to
    from truestep.runlog.digests import DigestLog, Kind

MODEL = "model."
"""Begins the names of parameters and buffers among those of the state."""

Pieces = Callable[[], Mapping[str, Piece]]


@dataclass
class Digests:
    """`gradients` and `tensors` give what this rank holds of them at the moment. `every`: steps between digests of
    both, 0 for none; `at`: further steps. `log` and `rows` are there on rank 0 only, and not in a replay.

    `taken`: by kind and name, of the step `taken_at`. All ranks call everything here together."""

    stage: str
    job: Job
    gradients: Pieces
    tensors: Pieces
    every: int = 0
    at: Collection[int] = ()
    log: RunLog | None = None
    rows: "DigestLog | None" = None
    taken: "dict[Kind, dict[str, int]]" = field(default_factory=dict)
    taken_at: int = -1
    _names: "dict[Kind, list[str]]" = field(default_factory=dict)

    def due(self, step: int) -> bool:
        """Whether both are taken at the step that makes `step` of them."""
        return step in self.at or (self.every > 0 and step % self.every == 0)

    def reduced(self, step: int) -> None:
        """Gradients are complete and not clipped yet, in the step that makes `step` of them."""
        if self.due(step):
            self._take(step, "gradient", self.gradients())

    def stepped(self, step: int) -> None:
        """`step` steps are done."""
        if self.due(step):
            self.state(step)
            self._log(step, self.taken)

    def state(self, step: int) -> dict[str, int]:
        """Of the state after `step` steps, by name."""
        if self.taken_at != step or "state" not in self.taken:
            self._take(step, "state", self.tensors())
        return self.taken["state"]

    def forget(self) -> None:
        """The state is another one, though perhaps of the same step."""
        self.taken, self.taken_at = {}, -1

    def saved(self, step: int, values: Mapping[str, int]) -> None:
        """The state after `step` steps was saved, and had these. On rank 0."""
        if not self.due(step):
            self._log(step, {"state": dict(values)})
        if self.rows:
            self.rows.flush()

    def _take(self, step: int, kind: "Kind", pieces: Mapping[str, Piece]) -> None:
        if self.taken_at != step:
            self.taken, self.taken_at = {}, step
        if not self._names:  # the same in every step; each rank knows but its own
            self._names = _names(self.tensors(), self.job)
        names = self._names[kind]
        values = fingerprints(pieces, names).cpu()
        if self.job.control is not None:
            dist.all_reduce(values, group=self.job.control)
        self.taken[kind] = dict(zip(names, values.tolist()))

    def _log(self, step: int, taken: "dict[Kind, dict[str, int]]") -> None:
        if self.log is None:
            return
        texts = {kind: combined(values.keys(), values.values()) for kind, values in taken.items()}
        self.log.append("digest", stage=self.stage, step=step, **texts)
        for kind, values in taken.items():
            if self.rows:
                self.rows.append(self.stage, step, kind, values)


def _names(tensors: Mapping[str, Piece], job: Job) -> "dict[Kind, list[str]]":
    """The names of all tensors that any rank holds, sorted, on all ranks. A gradient that a step does not make, and
    that of a buffer, counts as zero."""
    names = sorted({name for held in job.everybody(list(tensors)) for name in held})
    return {"state": names, "gradient": [name.removeprefix(MODEL) for name in names if name.startswith(MODEL)]}
