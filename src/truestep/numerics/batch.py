"""One microbatch: rows of one fixed shape, as tensors. B rows, T tokens each."""

from dataclasses import dataclass

import torch

IGNORE = -100
"""Label of a place that is no target (the value that torch's cross-entropy ignores by default)."""


@dataclass(frozen=True)
class Batch:
    """tokens_BT int64; labels_BT int64, already shifted (labels[b, t] is the token after tokens[b, t]; IGNORE = no
    target); positions_BT int64, restarting at 0 in every document; documents_BT int32, equal numbers attend to each
    other, -1 marks padding."""

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor

    @property
    def num_targets(self) -> int:
        """Places that have a target. Called on CPU batches, before they are moved."""
        return int((self.labels_BT != IGNORE).sum())

    def to(self, device: torch.device | str) -> "Batch":
        """On `device`, without waiting. Where every row is one document, its number is spread over the row (stride 0):
        a model on a GPU sees that from the outside, and takes no masks."""
        move = lambda x: x.to(device, non_blocking=True)  # noqa: E731
        documents_BT = self.documents_BT
        first_B1 = documents_BT[:, :1]
        if documents_BT.device.type == "cpu" and bool(((documents_BT == first_B1) & (first_B1 >= 0)).all()):
            documents_BT = move(first_B1).expand_as(documents_BT)
        return Batch(move(self.tokens_BT), move(self.labels_BT), move(self.positions_BT), move(documents_BT))
