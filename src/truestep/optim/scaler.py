"""Dynamic loss scaling for float16: small gradients are lifted into its range, and a step that overflows is skipped."""

from collections.abc import Sequence

import torch

from truestep.optim.clip import scale_


class LossScaler:
    """Multiply the loss by `scale` before backward; `unscale_` the gradients before anything looks at them; tell
    `update` whether the norm was finite. The norm is global, so all ranks skip alike and keep the same scale. A power
    of two throughout, so scaling changes no bit of a gradient in range. `LossScaler.off()` scales by 1 and never
    changes."""

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000, enabled: bool = True):
        self.scale = scale
        self.enabled = enabled
        self._growth_interval = growth_interval
        self._good_steps = 0

    @classmethod
    def off(cls) -> "LossScaler":
        return cls(scale=1.0, enabled=False)

    def unscale_(self, grads: Sequence[torch.Tensor]) -> None:
        if self.enabled and grads:
            scale_(grads, torch.tensor(1.0 / self.scale, device=grads[0].device))

    def update(self, finite: bool) -> None:
        """After a step: halve the scale if its gradients were not finite (the step is to be skipped), double it after
        `growth_interval` good ones in a row."""
        if not self.enabled:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self._good_steps == self._growth_interval:
            self.scale, self._good_steps = min(self.scale * 2, 2.0**24), 0

    def state(self) -> dict[str, float]:
        """For the checkpoint; plain numbers."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale, self._good_steps = state["scale"], int(state["good_steps"])
