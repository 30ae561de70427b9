"""Samples: rows of a corpus that are not plain text, as ids with a role for each; and how rows become them.

A *unit* is a list of samples that must stay together in one row of a batch: one for supervised fine-tuning, the chosen
and the rejected answer for preferences.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from truestep.data.tokenizer import Tokenizer
from truestep.errors import DataError
from truestep.recipe.data import DataSection

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


def row_text(row: dict[str, Any], section: DataSection) -> str:
    """The text of a row that copies, held-out rows and evaluation texts are told by."""
    return "\n".join(str(row.get(section.fields.get(name, name), "")) for name in ("prompt", "completion"))


def render(row: dict[str, Any], section: DataSection, tokenizer: Tokenizer) -> list[Unit]:
    """The units of a row. DataError names the field and the remedy."""
    texts = []
    for name in ("prompt", "completion"):
        field = section.fields.get(name, name)
        if not isinstance(row.get(field), str):
            raise DataError(f"field {field!r} holds {row.get(field)!r}, not text; repair the row, or set data.fields.")
        texts.append(row[field])
    prompt, completion = tokenizer.encode_batch(texts)
    ids = np.concatenate([prompt, completion, [tokenizer.eod_id]])
    roles = np.full(len(ids), LAST, dtype=np.uint8)
    roles[: len(prompt)] = NO_LOSS
    return [[Sample(ids, roles)]]
