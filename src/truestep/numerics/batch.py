"""One microbatch: rows of one fixed shape, as tensors. B rows, T tokens each."""

from dataclasses import dataclass

import torch

IGNORE = -100
"""Label of a place that is no target (the value that torch's cross-entropy ignores by default)."""


@dataclass(frozen=True)
class Batch:
    """tokens_BT int64; labels_BT int64, already shifted (labels[b, t] is the token after tokens[b, t]; IGNORE = no
    target); positions_BT int64, restarting at 0 in every document; documents_BT int32, equal numbers attend to each
    other, -1 marks padding; None = every row is one whole document."""

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor | None

    @property
    def num_targets(self) -> int:
        """Places that have a target. Called on CPU batches, before they are moved."""
        return int((self.labels_BT != IGNORE).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """On `device`. Whether rows are whole documents is looked at here, on the CPU, since a GPU would have to be
        waited for; the plain causal kernels are the faster ones."""
        documents_BT = None if self._whole() else self.documents_BT
        moved = [
            None if x is None else x.to(device, non_blocking=True)
            for x in (self.tokens_BT, self.labels_BT, self.positions_BT, documents_BT)
        ]
        return Batch(*moved)  # pyright: ignore[reportArgumentType]

    def _whole(self) -> bool:
        if self.documents_BT is None or self.documents_BT.device.type != "cpu":
            return self.documents_BT is None
        first = self.documents_BT[:, :1]
        return bool(((self.documents_BT == first) & (first >= 0)).all())
