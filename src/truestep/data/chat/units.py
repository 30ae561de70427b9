"""What rows become: samples, ids with a role for each, in units that stay together; and what is wrong with a row."""

from dataclasses import dataclass

import numpy as np

from truestep.errors import DataError

NO_LOSS, EARLIER, LAST = 0, 1, 2
"""Roles of tokens: never with loss; made by the assistant in an earlier turn; made by it in its last turn."""


@dataclass(frozen=True)
class Sample:
    """`ids`: integers; `roles` uint8, one an id. `side`: +1 chosen or desirable, -1 rejected or undesirable, else 0.
    `value`: the margin of a pair or a score; or float32, one an id, the label of the step that ends there, NaN where
    none does."""

    ids: np.ndarray
    roles: np.ndarray
    side: int = 0
    value: float | np.ndarray = 0.0


Unit = list[Sample]


class RowError(DataError):
    """One row cannot be used: the field, what it holds, and the remedy. `reason` names the kind of fault in a few
    words, by which refused rows are counted."""

    def __init__(self, reason: str, sentence: str):
        self.reason = reason
        super().__init__(sentence)
