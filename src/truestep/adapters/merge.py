"""An adapter added to the weights that it stands beside: in fp32, then cast; and what the cast loses of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from truestep.adapters.peft import Factors


@dataclass
class Merged:
    """What merging did. `lost`: of each weight, the 2-norm of what rounding took from the adapter's change, relative to
    the 2-norm of that change."""

    lost: dict[str, float] = field(default_factory=dict)
    squares: list[tuple[float, float]] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The same over all weights together."""
        errors, changes = zip(*self.squares) if self.squares else ((0.0,), (1.0,))
        return (sum(errors) / sum(changes)) ** 0.5 if sum(changes) else 0.0

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.lost.items(), key=lambda pair: pair[1], default=("", 0.0))

    def add(
        self, name: str, weight: torch.Tensor, factors: Factors, dtype: torch.dtype, *, table: bool
    ) -> torch.Tensor:
        """`weight` and the adapter's change as one tensor of `dtype`, added in fp32 (float64 stays float64). `table`: a
        row of the weight is an input."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = factors.delta(wide)
        change = change.t() if table else change
        merged = (weight.to(wide) + change).to(dtype)
        exact = change.double()
        error = (merged.double() - weight.double() - exact).square().sum().item()
        size = exact.square().sum().item()
        self.squares.append((error, size))
        self.lost[name] = (error / size) ** 0.5 if size else 0.0
        return merged


def combined(adapters: Mapping[str, Mapping[str, Factors]], weights: Mapping[str, float]) -> dict[str, Factors]:
    """Several adapters as one whose change is the weighted sum of theirs: factors one beside the other, so the ranks
    add up. `weights` by the adapters' names."""
    paths = dict.fromkeys(path for name in weights for path in adapters[name])
    found: dict[str, Factors] = {}
    for path in paths:
        parts = [(adapters[name][path], weight) for name, weight in weights.items() if path in adapters[name]]
        a = torch.cat([one.a for one, _ in parts], dim=-2)
        b = torch.cat([one.b * (one.scale * weight) for one, weight in parts], dim=-1)
        found[path] = Factors(a, b, 1.0)
    return found
