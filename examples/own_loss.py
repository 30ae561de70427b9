"""A loss of your own: cross-entropy against smoothed labels (arXiv 1512.00567, section 7)."""

from torch.nn.functional import cross_entropy

from truestep.losses.base import LossSum
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput, Logits


class Smoothed:
    """A sum over targets, never a mean: truestep divides by the weight of the whole step, over all ranks."""

    def __init__(self, smoothing: float = 0.1):
        self.smoothing = smoothing  # the share of each target that goes to all tokens alike

    def weight(self, batch: Batch) -> int:
        return batch.num_targets

    def __call__(self, out: HeadInput | Logits, batch: Batch) -> LossSum:
        logits_NV, labels_N = out.logits().flatten(0, 1), batch.labels_BT.flatten()
        return LossSum(
            cross_entropy(logits_NV, labels_N, ignore_index=IGNORE, label_smoothing=self.smoothing, reduction="sum")
        )
