"""The optimizer as the training loop and the checkpoint see it: parts that step together, state by parameter name."""

from collections.abc import Sequence
from typing import Any

import torch

from truestep.optim.groups import Group


class NamedOptimizer:
    """One or more torch optimizers over disjoint groups. Their state is complete from before the first step, so that
    every checkpoint has it; its keys are "<parameter name>.<state key>", so that neither the order of parameters nor
    that of groups matters."""

    def __init__(self, groups: Sequence[Group], parts: Sequence[torch.optim.Optimizer]):
        self.groups = list(groups)
        self.parts = list(parts)
        self.named_params = {name: param for group in groups for name, param in group.params}
        self._peak_lr = [group["lr"] for group in self.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def lr(self) -> float:
        """Present rate of the group that comes last, which AdamW updates unless there are only Muon's."""
        return self.param_groups[-1]["lr"]

    def set_lr_factor(self, factor: float) -> None:
        """Every group's rate becomes its peak rate times `factor`."""
        for group, peak in zip(self.param_groups, self._peak_lr, strict=True):
            group["lr"] = peak * factor

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def named_state(self) -> dict[str, torch.Tensor]:
        """The live state tensors: filling them in place restores the optimizer."""
        return {f"{name}.{key}": value for name, kept in self.state_by_param().items() for key, value in kept.items()}

    def state_by_param(self) -> dict[str, dict[str, torch.Tensor]]:
        """The same by the parameter's name and then by the state's key."""
        states = {id(param): state for part in self.parts for param, state in part.state.items()}
        return {
            name: {key: value for key, value in states.get(id(param), {}).items() if value is not None}
            for name, param in self.named_params.items()
        }
