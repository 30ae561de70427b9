"""What must hold after every update, whatever the recipe; if it does not, the program is wrong, not the chips.

Most of the silent bugs of training programs break one of a few rules (TrainCheck, OSDI 2025): a parameter that nobody
updates, a rate that is not the schedule's, a tie that came undone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class View:
    """One rank's view after an update. `trainable`: names of its parameters that require gradients; `held`: those that
    the optimizer has; `without_gradient`: those that had none in this step. `rates`: of each group of parameters its
    name, its learning rate and the one that the schedule says. `states`: optimizer state by parameter, None where an
    optimizer may do without. `tensors`: parameters and state by name, as this rank holds them."""

    trainable: Collection[str]
    held: Collection[str]
    without_gradient: Collection[str]
    rates: Sequence[tuple[str, float, float]]
    states: Mapping[str, Mapping[str, torch.Tensor]] | None
    tensors: Mapping[str, torch.Tensor]


def violations(view: View) -> list[str]:
    """What does not hold, a sentence each with the parameter's name. Waits for the device once."""
    found = [f"parameter {name} is trainable, but not in the optimizer" for name in _missing(view.trainable, view.held)]
    found += [f"parameter {name} got no gradient" for name in sorted(view.without_gradient)]
    found += [
        f"the learning rate of group {group!r} is {rate:g}, not {scheduled:g} as scheduled"
        for group, rate, scheduled in view.rates
        if rate != scheduled
    ]
    if view.states is not None:
        with_state = [name for name, state in view.states.items() if state]
        lost = _missing(set(view.trainable) & set(view.held), with_state)
        found += [f"parameter {name} has no optimizer state" for name in lost]
    return found + [f"{name} is not finite" for name in not_finite(view.tensors)]


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the floating-point tensors with a NaN or an infinity among their elements."""
    floats = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}
    good = [torch.isfinite(tensor).all() for tensor in floats.values()]
    by_device = {flag.device for flag in good}
    told: dict[str, bool] = {}
    for device in by_device:
        names = [name for name, flag in zip(floats, good) if flag.device == device]
        flags = torch.stack([flag for flag in good if flag.device == device]).tolist()
        told |= dict(zip(names, flags))
    return [name for name in floats if not told[name]]


def _missing(wanted: Collection[str], there: Collection[str]) -> list[str]:
    return sorted(set(wanted) - set(there))
