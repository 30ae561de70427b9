"""Low-rank updates of frozen weights (arXiv 2106.09685): W + s B A, where only A and B are trained.

I inputs, O outputs, R rank, E stacked experts, M rows that are sorted by expert. A weight may have several adapters, by
name, of which those in use add up, each with a factor of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from truestep.numerics.low_precision.draws import Draws
from truestep.numerics.low_precision.place import Tokens
from truestep.numerics.pieces import Split

GroupedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Kind = Literal["linear", "table", "experts"]
Group = Literal["attention", "mlp", "experts", "embeddings", "head"]


class LowRank(nn.Module):
    """s B A: `a` (R, I) and `b` (O, R), or (E, R, I) and (E, O, R). Of a table of tokens, a linear map of one-hot rows,
    I counts the tokens."""

    def __init__(self, rank: int, inputs: int, outputs: int, scale: float, experts: int = 0):
        super().__init__()
        stack = (experts,) if experts else ()
        self.a = nn.Parameter(torch.empty(*stack, rank, inputs))
        self.b = nn.Parameter(torch.empty(*stack, outputs, rank))
        self.scale = scale


class Adapted(nn.ModuleDict):
    """The adapters of one weight. `factors`: of those in use; `on`: whether there are any, for a while. `dropout` is
    what their input goes through in training."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: dict[str, float] = {}
        self.on = True
        self.dropout: Dropout | None = None

    def put(self, name: str, adapter: LowRank) -> None:
        """Add an adapter, and use it."""
        self[name] = adapter
        self.factors[name] = 1.0

    @property
    def drops(self) -> bool:
        """Whether inputs are dropped now."""
        return self.dropout is not None and self.training

    def used(self) -> Iterator[tuple[LowRank, float]]:
        """Adapters in use, each with what its product is multiplied by."""
        for name, factor in self.factors.items() if self.on else ():
            adapter = self[name]
            assert isinstance(adapter, LowRank)
            yield adapter, adapter.scale * factor

    def forward(self, x: torch.Tensor, rows: slice | None = None) -> torch.Tensor | float:
        """What is added to x Wᵀ, of the outputs `rows`; 0 where no adapter is in use."""
        return self.up(self.down(x), rows)

    def down(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x Aᵀ of every adapter in use."""
        used = list(self.used())
        if used and self.drops:
            assert self.dropout is not None
            x = self.dropout(x)
        return [linear(x, adapter.a) for adapter, _ in used]

    def up(self, lows: list[torch.Tensor], rows: slice | None = None) -> torch.Tensor | float:
        """The sum of what belongs to the results of `down`."""
        parts = zip(lows, self.used(), strict=True)
        return sum(
            linear(low * scale, adapter.b if rows is None else adapter.b[rows]) for low, (adapter, scale) in parts
        )

    def matrices(self) -> list[torch.Tensor]:
        """A of every adapter in use, for whoever multiplies by it."""
        return [adapter.a for adapter, _ in self.used()]

    def looked_up(self, tokens_BT: torch.Tensor, own_BT: torch.Tensor | None = None) -> torch.Tensor | float:
        """What is added to the rows of a table; nothing where `own_BT` is false."""
        total: torch.Tensor | float = 0.0
        for adapter, scale in self.used():
            low = embedding(tokens_BT, adapter.a.t())
            low = low if own_BT is None else low * own_BT[..., None]
            total = total + linear(low * scale, adapter.b)
        return total

    def grouped(self, rows_MI: torch.Tensor, ends_E: torch.Tensor, product: GroupedProduct) -> torch.Tensor | float:
        """What is added to the product of rows with stacked weights."""
        total: torch.Tensor | float = 0.0
        for adapter, scale in self.used():
            total = total + product(product(rows_MI, adapter.a, ends_E) * scale, adapter.b, ends_E)
        return total

    def delta(self) -> torch.Tensor | float:
        """s B A, the sum of those in use, in the dtype of the factors."""
        total: torch.Tensor | float = 0.0
        for adapter, scale in self.used():
            with torch.autocast(adapter.a.device.type, enabled=False):
                total = total + scale * (adapter.b @ adapter.a)
        return total


class Dropout:
    """Sets elements of a linear map's input to 0 and divides the others by the share that is kept. Which ones depends
    on the microbatch's number and on where an element lies in the whole input, so on no mesh.

    Of `whole` features this rank has those from `start` on; `tokens`: which of a row's places it has."""

    def __init__(self, rate: float, draws: Draws, name: str, tokens: Tokens, start: int, whole: int):
        self.least = round(rate * 2**16)
        self.draws, self.name, self.tokens, self.start, self.whole = draws, name, tokens, start, whole

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _uncompiled(self, x)  # pyright: ignore[reportCallIssue]

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        tokens_N = self.tokens.numbers(x.shape[:-2].numel(), x.shape[-2], x.device)
        moment = self.draws.moment
        bits = self.draws.sixteen_bits(self.name, "dropout", moment, tokens_N, self.start, x.shape[-1], self.whole)
        return x * (bits >= self.least).view(x.shape) / (1 - self.least / 2**16)


@torch.compiler.disable  # the key of the draws changes in every step
def _uncompiled(dropout: Dropout, x: torch.Tensor) -> torch.Tensor:
    return dropout.drop(x)


@dataclass(frozen=True)
class Site:
    """A weight that can have adapters. `weight`: the name of its parameter; `path`: that of its adapters, which come
    into `holder` as the attribute `key`; `group`: what it is for."""

    weight: str
    path: str
    group: Group
    kind: Kind
    inputs: int
    outputs: int
    holder: nn.Module
    key: str
    experts: int = 0

    @property
    def adapted(self) -> Adapted | None:
        """Its adapters, if there are any."""
        found = self.holder._modules.get(self.key)
        return found if isinstance(found, Adapted) else None

    def adapt(self) -> Adapted:
        """Its adapters, which may be none so far."""
        found = self.adapted or Adapted()
        setattr(self.holder, self.key, found)
        return found

    def splits(self, of_weight: Split | None) -> dict[str, Split]:
        """How its adapters are split, by the names of their parameters, where its weight is split so."""
        if self.adapted is None or of_weight is None:
            return {}
        if of_weight.axis == "ep":
            both = {"a": of_weight, "b": of_weight}
        else:
            of_inputs = (of_weight.dim == 1) != (self.kind == "table")
            both = {"a": Split("tp", 1, of_weight.unit)} if of_inputs else {"b": Split("tp", 0, of_weight.unit)}
        return {f"{self.path}.{name}.{key}": split for name in self.adapted for key, split in both.items()}


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name in the whole model."""
    return ".lora." in name


def adapted_modules(*models: nn.Module) -> list[Adapted]:
    """The adapters of all weights of some models, or of the parts of one."""
    return [module for model in models for module in model.modules() if isinstance(module, Adapted)]
