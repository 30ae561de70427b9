"""One microbatch: rows of one fixed shape, as tensors. B rows, T tokens each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from truestep.errors import UserError

IGNORE = -100
"""Label of a place that is no target (the value that torch's cross-entropy ignores by default)."""


@dataclass(frozen=True)
class Batch:
    """tokens_BT int64; labels_BT int64, already shifted (labels[b, t] is the token after tokens[b, t]; IGNORE = no
    target); positions_BT int64, restarting at 0 in every document; documents_BT int32, equal numbers attend to each
    other, -1 marks padding; None = every row is one whole document.

    A `part` has some columns of the rows, but the documents of whole rows: its queries see keys outside of it, and
    every rank of the context axis answers alike whether rows are whole documents.

    `columns`: what else is known of the places, by name, each (B, T) or (B, T, ...) (truestep.data.samples says which
    there are); padding has zeros in them."""

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor | None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_targets(self) -> int:
        """Places that have a target. Called on CPU batches, before they are moved."""
        return int((self.labels_BT != IGNORE).sum())

    def without_targets(self) -> "Batch":
        """The same rows as padding: no target, and no document."""
        like = self.tokens_BT if self.documents_BT is None else self.documents_BT
        documents_BT = torch.full_like(like, -1, dtype=torch.int32)
        zeros = {name: torch.zeros_like(column) for name, column in self.columns.items()}
        return Batch(self.tokens_BT, torch.full_like(self.labels_BT, IGNORE), self.positions_BT, documents_BT, zeros)

    def part(self, columns: Sequence[range]) -> "Batch":
        """These columns of every row, in this order."""

        def taken(x_BT: torch.Tensor) -> torch.Tensor:
            return torch.cat([x_BT[:, places.start : places.stop] for places in columns], dim=1)

        documents_BS = self.documents_BT
        if documents_BS is None:
            documents_BS = torch.zeros_like(self.tokens_BT, dtype=torch.int32)
        rest = {name: taken(column) for name, column in self.columns.items()}
        return Batch(taken(self.tokens_BT), taken(self.labels_BT), taken(self.positions_BT), documents_BS, rest)

    def to(self, device: torch.device | str) -> "Batch":
        """On `device`. Whether rows are whole documents is looked at here, on the CPU, since a GPU would have to be
        waited for; the plain causal kernels are the faster ones."""
        documents_BT = None if self._whole() else self.documents_BT
        return replace(self, documents_BT=documents_BT).map(lambda x: x.to(device, non_blocking=True))

    def map(self, change: Callable[..., torch.Tensor], *others: "Batch") -> "Batch":
        """`change` applied to every tensor, along with the same one of batches with the same columns."""
        every = (self, *others)
        return Batch(
            change(*(one.tokens_BT for one in every)),
            change(*(one.labels_BT for one in every)),
            change(*(one.positions_BT for one in every)),
            None if self.documents_BT is None else change(*(one.documents_BT for one in every)),
            {name: change(*(one.columns[name] for one in every)) for name in self.columns},
        )

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that is there, in the order of `map`."""
        found = [self.tokens_BT, self.labels_BT, self.positions_BT]
        return [*found, *([] if self.documents_BT is None else [self.documents_BT]), *self.columns.values()]

    def _whole(self) -> bool:
        if self.documents_BT is None or self.documents_BT.device.type != "cpu":
            return self.documents_BT is None
        first = self.documents_BT[:, :1]
        return bool(((self.documents_BT == first) & (first >= 0)).all())


def columns(length: int, size: int, rank: int, parts: int = 1) -> list[range]:
    """The places of a row of `length` tokens that `rank` of `size` owns, in the order in which it holds them.

    One part: contiguous. Two: a part from the row's head, and that part's mirror from its tail, so that every rank has
    as many pairs of a query and a key that is not later. UserError if the row has no such equal parts."""
    number = size * parts
    if length % number:
        nearest = f"{length - length % number} or {length - length % number + number}"
        text = f"a row of {length} tokens has no {number} equal parts for context parallelism; nearest: {nearest}"
        raise UserError(text)
    own = [rank] if parts == 1 else [rank, number - 1 - rank]
    return [range(part * length // number, (part + 1) * length // number) for part in own]
