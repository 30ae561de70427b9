"""Integer sums of the gradients of one step: what `exact` adds into, and how they become `.grad`."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from truestep.numerics.exact_collectives import Trail, sum_integers_
from truestep.numerics.fixed_point import add_rounded, sum_of_squares, to_float
from truestep.parallel.probe import GradientProbe


@dataclass(frozen=True)
class Route:
    """How the gradient of a parameter is completed after this rank's part of it has been summed: over each of `groups`
    in turn, once a step. `owned`: this rank counts its elements in the norm; exactly one rank of the job does."""

    groups: tuple[dist.ProcessGroup, ...] = ()
    owned: bool = True


@dataclass(frozen=True)
class Slot:
    """A parameter's columns [start, start + width) of a bucket, the last of which may be padding. `index` is its place
    in the job's list of names."""

    name: str
    index: int
    start: int
    width: int
    route: Route


class Scales:
    """What all buckets of a rank share in a step: exponents, the largest magnitudes met, and what collectives left."""

    def __init__(self, names: Sequence[str], uses: Mapping[str, str], device: torch.device, probe: GradientProbe):
        self.num_names = len(names)
        self.index = {name: index for index, name in enumerate(names)}
        self.index |= {use: self.index[name] for use, name in uses.items()}
        self.device, self.probe = device, probe
        self.exponents: list[int] = []
        self.open = False
        self.trail = Trail()

    def begin(self, exponents: list[int]) -> None:
        self.exponents, self.open = exponents, True
        self.largest_P = torch.zeros(self.num_names, dtype=torch.float64, device=self.device)
        self.residual = torch.zeros((), dtype=torch.int64, device=self.device)
        self.trail.clear()

    def add(self, slot: Slot, total_N: torch.Tensor, x_RN: torch.Tensor) -> None:
        """Round the rows of `x_RN`, parts of the gradient of one use in one microbatch each, and add them up."""
        met = add_rounded(total_N, x_RN, self.exponents[slot.index])
        known = self.largest_P[slot.index]
        torch.maximum(known, met, out=known)


class Bucket(ABC):
    """The sums of some parameters in one flat int64 tensor, which lives from `begin` to `fill`."""

    def __init__(self, scales: Scales, slots: list[Slot]):
        self.scales, self.slots = scales, slots
        self.width = slots[-1].start + slots[-1].width
        self._total_N: torch.Tensor | None = None

    def begin(self) -> None:
        self._total_N = torch.zeros(self.width, dtype=torch.int64, device=self.scales.device)

    def part(self, slot: Slot) -> torch.Tensor:
        if self._total_N is None:
            raise RuntimeError(f"a gradient of {slot.name} was made outside of Exact.step()")
        return self._total_N[slot.start : slot.start + slot.width]

    def take(self, slot: Slot, grad: torch.Tensor) -> None:
        """Add the gradient of one use in one microbatch, whole."""
        self.scales.add(slot, self.part(slot), grad.detach().reshape(1, -1))

    def sweep(self) -> None:  # noqa: B027  # hooks leave most buckets nothing to do
        """After the backward pass of a microbatch: take what has not been taken on the way."""

    def slot(self, name: str) -> Slot | None:
        return next((slot for slot in self.slots if slot.name == name), None)

    @abstractmethod
    def parameter(self, slot: Slot) -> torch.nn.Parameter: ...

    def complete(self) -> None:
        """Sum the integers over the groups of each slot's route; neighbours with the same groups together."""
        for groups, run in groupby(self.slots, key=lambda slot: slot.route.groups):
            first, *rest = run
            last = rest[-1] if rest else first
            assert self._total_N is not None
            for group in groups:
                part_N = self._total_N[first.start : last.start + last.width]
                self.scales.residual += sum_integers_(part_N, group, self.scales.trail)

    def fill(self) -> Iterable[tuple[Slot, torch.Tensor]]:
        """Set every `.grad`, give the integers up, and go through the local parts of the gradients."""
        found = [(slot, self._fill(slot)) for slot in self.slots]
        self._total_N = None
        return found

    def drop(self) -> None:
        self._total_N = None
        for slot in self.slots:
            self.parameter(slot).grad = None

    def _fill(self, slot: Slot) -> torch.Tensor:
        param = self.parameter(slot)
        if param.grad is not None:
            raise RuntimeError(f"{slot.name} has a gradient that was summed in floating point")
        local = param.to_local() if isinstance(param, DTensor) else param
        integers = self.part(slot)[: local.numel()]
        grad = to_float(integers, self.scales.exponents[slot.index], local.dtype).view(local.shape)
        if isinstance(param, DTensor):
            mesh, placements = param.device_mesh, param.placements
            param.grad = DTensor.from_local(grad, mesh, placements, shape=param.shape, stride=param.stride())
        else:
            param.grad = grad
        return grad


class HookedBucket(Bucket):
    """Plain parameters, whole on this rank, each of whose gradients is taken as soon as autograd has made it."""

    def __init__(self, scales: Scales, params: Mapping[str, torch.nn.Parameter], route: Callable[[str], Route]):
        super().__init__(scales, lay_out(scales, {name: param.numel() for name, param in params.items()}, route))
        self._params = dict(params)
        # Python's collector does not see through autograd: a hook that holds the bucket would keep it, and groups that
        # are given up, for ever.
        seen: weakref.ref[HookedBucket] = weakref.ref(self)
        for slot in self.slots:
            self.parameter(slot).register_post_accumulate_grad_hook(partial(_taken, seen, slot))

    def parameter(self, slot: Slot) -> torch.nn.Parameter:
        return self._params[slot.name]

    def sweep(self) -> None:
        """A pipeline's split backward sets gradients without the engine's hooks."""
        for slot in self.slots:
            self.accumulated(slot, self.parameter(slot))

    def accumulated(self, slot: Slot, param: torch.Tensor) -> None:
        """Autograd has made a gradient."""
        if param.grad is not None and self.scales.open:
            grad, param.grad = param.grad, None
            self.take(slot, grad)


def _taken(bucket: "weakref.ref[HookedBucket]", slot: Slot, param: torch.Tensor) -> None:
    here = bucket()
    if here is not None:
        here.accumulated(slot, param)


def lay_out(scales: Scales, widths: Mapping[str, int], route: Callable[[str], Route]) -> list[Slot]:
    slots, start = [], 0
    for name, width in widths.items():
        slots.append(Slot(name, scales.index[name], start, width, route(name)))
        start += width
    return slots


def peaks(scales: Scales, grads: Iterable[tuple[Slot, torch.Tensor]]) -> torch.Tensor:
    """The largest magnitude of each parameter's gradient over the elements that this rank owns, by the job's list of
    names; float64."""
    peaks_P = torch.zeros_like(scales.largest_P)
    for slot, grad in grads:
        if slot.route.owned and grad.numel():
            low, high = grad.aminmax()
            peaks_P[slot.index] = torch.maximum(high, -low)
    return peaks_P


def squares(scales: Scales, grads: Iterable[tuple[Slot, torch.Tensor]], peaks_P: list[float]) -> torch.Tensor:
    """Limbs of Σ g² of each parameter, over the elements that this rank owns: int64 [names, 2]."""
    squares_P2 = torch.zeros(scales.num_names, 2, dtype=torch.int64, device=scales.device)
    for slot, grad in grads:
        if slot.route.owned:
            squares_P2[slot.index] = sum_of_squares(grad.flatten(), peaks_P[slot.index])
    return squares_P2
