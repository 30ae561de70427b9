"""The seam through which a step lets itself be looked at from inside, before it changes any weight."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from truestep.numerics.batch import Batch
from truestep.parallel.model import LossOf
from truestep.runlog.records import Fault


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step, ready to be computed again, here or for another rank. `batches`: its
    microbatches; `begin(number)`: sets the random streams of a microbatch of the global batch by its number."""

    batches: list[Batch]
    loss_of: LossOf
    factor: float
    begin: Callable[[int], None]


class Guard(Protocol):
    """Looks at every step; whatever it finds it raises as `Corruption`, on all ranks together."""

    @property
    def armed(self) -> bool:
        """Whether bits of this step will be compared, so that it has to take kernels that repeat themselves."""
        ...

    def suspect(self) -> None:
        """There is a reason, be it none that proves anything, to have one of the next steps computed again."""
        ...

    def idle(self) -> None:
        """Between two steps there is time for a short test of this rank's device."""
        ...

    def begin(self, work: Work) -> None:
        """Before the first forward pass."""
        ...

    def reduced(self) -> None:
        """Gradients are complete and have been handed to the optimizer's parameters."""
        ...

    def numbers(self) -> Iterable[float]:
        """Of this rank, to be summed over ranks in the step's agreement."""
        ...

    def inspect(self, shards: list[tuple[float, float, float]], numbers: list[float], *, finite: bool) -> None:
        """Before the update: the last look. `shards`: of this rank's microbatches the loss sum, weight and gradient
        norm; `numbers`: the sums of all ranks' numbers; `finite`: whether loss and gradient norm of the step are.
        Collective."""
        ...


class Corruption(Exception):
    """Bits are not what they should be, all ranks agree. What this step computed must not be used."""

    def __init__(self, faults: list[Fault]):
        self.faults = faults
        super().__init__("; ".join(fault.text for fault in faults))

    @property
    def since(self) -> int:
        """The first step whose result may be wrong."""
        return min(fault.since or 0 for fault in self.faults)


def hosts_of(faults: Iterable[Fault]) -> tuple[str, ...]:
    """Those that were shown to be at fault."""
    return tuple(sorted({fault.host for fault in faults if fault.named and fault.host}))


def everything(questions: Iterable[float], guard: Guard | None) -> Iterable[float]:
    """The numbers of a step's agreement; the guard is asked when they are used, so after the last backward pass."""
    yield from questions
    if guard is not None:
        yield from guard.numbers()
