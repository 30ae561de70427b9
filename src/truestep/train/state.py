"""Everything that a stage's training consists of at one moment, and how it becomes a checkpoint and comes back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from truestep.data.shares import Shares
from truestep.errors import CheckpointError
from truestep.losses.base import Loss
from truestep.numerics.batch import Batch
from truestep.numerics.pieces import Piece, piece_of
from truestep.optim.named import NamedOptimizer
from truestep.optim.scaler import LossScaler
from truestep.parallel.exact import Exact
from truestep.parallel.job import Job
from truestep.parallel.model import Parallel
from truestep.plan.activations import Recompute
from truestep.recipe.stage import Optim
from truestep.runlog.counters import Counters
from truestep.sentinel.spikes import SpikeWatch
from truestep.sentinel.statistics import Statistics
from truestep.train.average import Average
from truestep.train.digests import Digests
from truestep.train.guard import Guard


@dataclass
class TrainState:
    """`step` counts steps of data that were trained on; `updates` counts optimizer steps that were taken (spikes and
    fp16 overflows skip one), and is what the learning-rate schedule goes by. `parent` holds the held-out figures of the
    start model; `base` is the digest of its files, where adapters are trained beside its weights, which no checkpoint
    holds. `own_weight`: the loss may count something else than targets, so its weights have to be added up over
    ranks. `before`: what adds columns to a microbatch that is on its device, before its forward pass: models beside
    this one that take no gradient. `before_step`: called at the beginning of each step, on all ranks. `recomputed`:
    what each block of the whole model recomputes, by its number, where that is known. `guard` looks at every step from
    inside, `spikes` at its loss and gradient norm, `statistics` at those of its shards. `average`: of the weights,
    where that is to be kept. `before_update` is called before the optimizer changes anything, for whoever reads the
    state until then."""

    job: Job
    parallel: Parallel
    optimizer: NamedOptimizer
    section: Optim
    loss: Loss
    scaler: LossScaler
    steps: int
    seed: int
    exact: Exact | None = None
    own_weight: bool = False
    before: list[Callable[[Batch], Batch]] = field(default_factory=list)
    before_step: list[Callable[[], None]] = field(default_factory=list)
    guard: Guard | None = None
    recomputed: dict[int, Recompute] = field(default_factory=dict)
    step: int = 0
    updates: int = 0
    tokens: int = 0
    targets: int = 0
    loader: dict[str, Any] = field(default_factory=dict)
    parent: dict[str, Any] | None = None
    base: str | None = None
    router_metrics: list[str] | None = None
    digests: Digests | None = None
    spikes: SpikeWatch = field(default_factory=SpikeWatch)
    statistics: Statistics | None = None
    counters: Counters = field(default_factory=Counters)
    shares: Shares | None = None
    average: Average | None = None
    before_update: Callable[[], None] | None = None

    def number(self, index: int, data_rank: int) -> int:
        """Number in the global batch of the microbatch that a data rank has at `index`."""
        size = self.parallel.groups.data_size
        return index * size + data_rank if self.shares is None else self.shares.number(index, data_rank)

    def active(self, count: int) -> int:
        """How many of its `count` microbatches of the next step this rank computes. The rest is padding, for ranks of
        other replicas have more."""
        if self.shares is None or self.shares.even:
            return count
        return self.shares.active(self.step, self.parallel.groups.data_rank)

    def tensors(self) -> dict[str, Piece]:
        """What this rank holds of parameters, of buffers that persist, and of optimizer state, by name: what a
        checkpoint holds as bytes."""
        model = self.parallel.pieces()
        if self.base is not None:
            model = {name: piece for name, piece in model.items() if name not in self.parallel.frozen}
        optimizer = {
            f"optim.{name}.{key}": _state_piece(value, model[name])
            for name, states in self.optimizer.state_by_param().items()
            for key, value in states.items()
        }
        averages = {} if self.average is None else self.average.values
        optimizer |= {f"optim.{name}.average": replace(model[name], local=value) for name, value in averages.items()}
        kept = {} if self.exact is None else self.exact.state_tensors()
        scales = {name: piece_of(value).owned_if(self.job.first) for name, value in kept.items()}
        return {f"model.{name}": piece for name, piece in model.items()} | optimizer | scales

    def until_update(self) -> list[str]:
        """Names of tensors that change in the optimizer's update only: parameters and their optimizer state."""
        frozen = self.parallel.frozen if self.base is not None else set()
        parameters = self.parallel.named_parameters().keys() - frozen
        optimizer = [f"optim.{name}.{key}" for name, kept in self.optimizer.state_by_param().items() for key in kept]
        averages = [] if self.average is None else [f"optim.{name}.average" for name in self.average.values]
        return [*(f"model.{name}" for name in parameters), *optimizer, *averages]

    def result(self) -> dict[str, Piece]:
        """The model that the stage gives: its weights, or their average."""
        return self.parallel.pieces() if self.average is None else self.average.pieces()

    @contextmanager
    def as_result(self) -> Iterator[None]:
        """While the model computes as the one that the stage would give by now."""
        if self.average is None:
            yield
            return
        if self.before_update is not None:
            self.before_update()
        with self.average.in_place():
            yield

    def extra(self) -> dict[str, Any]:
        """The rest of the state, as JSON. Random streams are derived from the seed, which is their state."""
        return {
            "step": self.step,
            "updates": self.updates,
            "tokens": self.tokens,
            "targets": self.targets,
            "seed": self.seed,
            "loader": self.loader,
            "scaler": self.scaler.state(),
            "spikes": self.spikes.state(),
            "parent": self.parent,
        } | ({} if self.base is None else {"base": self.base})

    def restore(self, extra: dict[str, Any]) -> None:
        """Take over what `extra` said when the tensors were saved (they have been loaded in place)."""
        missing = sorted(set(self.extra()) - set(extra))
        if missing:
            raise CheckpointError(
                f"the checkpoint's state lacks {', '.join(missing)}; it was written by another program or version"
            )
        if self.base is not None and extra["base"] != self.base:
            raise CheckpointError(
                f"the checkpoint's adapters were trained beside weights of digest {extra['base']}, but those of the "
                f"start model are {self.base} now; put that model back, or choose another run.name"
            )
        self.step, self.updates = extra["step"], extra["updates"]
        self.tokens, self.targets = extra["tokens"], extra["targets"]
        self.loader, self.parent = extra["loader"], extra["parent"]
        self.scaler.load_state(extra["scaler"])
        self.spikes.load_state(extra["spikes"])
        self.parallel.updated()
        if self.digests is not None:
            self.digests.forget()


def _state_piece(value: torch.Tensor, parameter: Piece) -> Piece:
    """State of a parameter's shape lies where the parameter does; any other is one small tensor, told by the owner of
    the parameter's first element."""
    if not isinstance(value, DTensor) and value.shape == parameter.local.shape:
        return replace(parameter, local=value)
    return piece_of(value).owned_if(parameter.owned and not any(parameter.start))
