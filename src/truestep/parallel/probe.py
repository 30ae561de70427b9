"""What this rank contributes to each gradient reduction, a microbatch at a time, before the reduction: its norm, and on
request the fingerprint of every parameter's part of it.

Under FSDP2 it is read off the buffer that enters the reduce-scatter; elsewhere off each leaf's gradient as autograd
makes it (before it is added to `.grad`). Everything stays on the device until it is asked for.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from truestep.numerics.fingerprint import fingerprint
from truestep.numerics.fixed_point import GOLDEN

Parts = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""The parts of a contribution by the name of the parameter, in the same memory."""


class GradientProbe:
    """Collects sums of squares; `next_microbatch` closes one microbatch, `take` returns and clears the norms.

    `watched`: microbatches whose fingerprints are taken, into `prints` by microbatch and name. Those of a pipeline are
    mixed: 0 stands for all of them. `strike(name, part, microbatch)` is where fault injection gets at gradients.
    """

    def __init__(self):
        self.watched: Collection[int] = ()
        self.prints: dict[int, dict[str, torch.Tensor]] = {}
        self.strike: Callable[[str, torch.Tensor, int | None], None] | None = None
        self.microbatch: int | None = None
        self._parts: list[torch.Tensor] = []
        self._done: list[torch.Tensor] = []

    def begin(self, microbatch: int | None) -> None:
        """A microbatch comes next (None: all of a pipeline's, mixed)."""
        self.microbatch = microbatch
        if not microbatch:  # the first, perhaps of a step that is computed once more
            self.prints = {}

    def add(self, x: torch.Tensor, parts: Parts) -> None:
        """Count the elements of one contribution. Accumulates at least in fp32."""
        if self.strike is not None:
            for name, part in parts():
                self.strike(name, part, self.microbatch)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(x, dtype=dtype)
        self._parts.append(norm * norm)
        if (self.microbatch or 0) in self.watched:
            prints = self.prints.setdefault(self.microbatch or 0, {})
            for name, part in parts():
                # of several contributions the order counts, so that what is too much in one cannot make up for another
                prints[name] = prints.get(name, 0) * GOLDEN + fingerprint(part)

    def next_microbatch(self) -> None:
        if self._parts:
            self._done.append(torch.stack(self._parts).sum().sqrt())
            self._parts.clear()

    def nothing(self, microbatches: int) -> None:
        """So many more contribute nothing."""
        if self._done:
            self._done += [torch.zeros_like(self._done[0])] * microbatches

    def take(self) -> list[float]:
        """Norms of the microbatches since the last call, in order."""
        norms = self.norms()
        self._done.clear()
        return norms

    def norms(self) -> list[float]:
        """The same, left as they are."""
        return torch.stack(self._done).tolist() if self._done else []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a run of one microbatch, or of a pipeline, whose norms do not count; its `prints` are taken, and those
        from before come back afterwards."""
        kept = self.watched, self.prints, self._done
        self.watched, self.prints, self._done = (0,), {}, []
        try:
            yield
        finally:
            self.watched, self.prints, self._done = kept


def watch_leaves(model: nn.Module, probe: GradientProbe) -> None:
    """Note every leaf gradient of `model` as it is produced."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad, name=name: probe.add(grad, lambda: [(name, grad)]))
