"""Prompts of some units of a sample store with the answers of others, in rows: what KTO's reference point is taken over
(arXiv 2402.01306, section 4: answers that have nothing to do with their prompt)."""

import numpy as np
import torch

from truestep.data.loader import Corpus, padding
from truestep.data.sample_store import SampleStore
from truestep.data.samples import LAST
from truestep.errors import DataError
from truestep.numerics.batch import Batch


def mismatched_rows(corpus: Corpus, context: int, num_pairs: int, rows: int, ranks: int) -> tuple[list[Batch], int]:
    """(microbatches of `rows` rows, a multiple of `ranks` of them; pairs in them). Units of one sample are taken evenly
    spaced from the corpus, the same ones every time; each prompt gets the answer of the next. The end of what is too
    long is cut; DataError where no pair is left."""
    store = corpus.store
    assert isinstance(store, SampleStore)
    count = min(num_pairs, store.num_units)
    if count < 2:
        raise DataError(
            f"{store.path}: KTO's reference point takes prompts with answers of other rows, but there is one row only; "
            f"add data"
        )
    numbers = np.arange(count) * store.num_units // count
    samples = [store.sample(int(number)) for number in store.units_at(numbers)]
    split = [
        int(np.flatnonzero(one.roles == LAST)[0]) if (one.roles == LAST).any() else len(one.ids) for one in samples
    ]
    pairs = []
    for number, (sample, at) in enumerate(zip(samples, split)):
        other = (number + 1) % count
        answer = samples[other].ids[split[other] :]
        if 0 < at < context and len(answer):
            pairs.append((sample.ids[:at], answer[: context - at]))
    if not pairs:
        raise DataError(
            f"{store.path}: no prompt of {count} rows leaves room for an answer in {context} tokens; raise context"
        )
    found = _rows(pairs, context)
    size = -(-len(found) // (rows * ranks)) * rows * ranks
    whole = found + [padding(1, context)] * (size - len(found))
    batches = [_joined(whole[first : first + rows]) for first in range(0, size, rows)]
    return batches, len(pairs)


def _rows(pairs: list[tuple[np.ndarray, np.ndarray]], context: int) -> list[Batch]:
    """The pairs in order, as many in a row as there is room for, each a document."""
    found, at, document = [padding(1, context)], 0, 0
    for prompt, answer in pairs:
        ids = np.concatenate([prompt, answer])
        if at + len(ids) > context:
            found.append(padding(1, context))
            at = document = 0
        row, here = found[-1], slice(at, at + len(ids))
        assert row.documents_BT is not None
        row.tokens_BT[0, here] = torch.from_numpy(ids.astype(np.int64))
        row.positions_BT[0, here] = torch.arange(len(ids))
        row.documents_BT[0, here] = document
        targets = slice(at + len(prompt) - 1, at + len(ids) - 1)
        row.labels_BT[0, targets] = torch.from_numpy(answer.astype(np.int64))
        at, document = at + len(ids), document + 1
    return found


def _joined(rows: list[Batch]) -> Batch:
    return rows[0].map(lambda *parts: torch.cat(parts), *rows[1:])
