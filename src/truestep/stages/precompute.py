"""What a model says of every token of a store, made once before the first step and kept beside the stores: a stored
column (truestep.data.columns), such as the log-probabilities of a reference.

All ranks take their share of the rows; rank 0 writes. A column is named by all that decides its values, so a run that
goes on, or another one of the same model and data, verifies what is there and uses it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truestep.data.columns import ColumnStore, ColumnWriter, column_key
from truestep.data.loader import Corpus, evaluation_batches
from truestep.data.packing import Column, Packing
from truestep.errors import DataError
from truestep.numerics.batch import Batch
from truestep.parallel.model import Parallel
from truestep.recipe.stage import Stage
from truestep.stages.context import Context
from truestep.train.evaluate import as_it_was

TOGETHER = 16
"""Microbatches of each rank whose values are brought to rank 0 at a time."""


@dataclass(frozen=True)
class Wanted:
    """A column to be made. `of(parallel, batch)`: its values (B, T, *shape) at this rank's places of a microbatch, 0
    where there are none, None on ranks without the head; collective. `decides`: what else than the store and the shape
    of its rows decides the values (JSON): the model's weights, the precision."""

    name: str
    column: Column
    of: Callable[[Parallel, Batch], torch.Tensor | None]
    decides: Mapping[str, Any]


@dataclass(frozen=True)
class _Part:
    """Values (rows, places, *shape) of some rows of a packing at some of their places."""

    rows: np.ndarray
    places: np.ndarray
    values: np.ndarray


def token_columns(
    context: Context, parallel: Parallel, data: str, corpus: Corpus, stage: Stage, wanted: Wanted
) -> ColumnStore:
    """The column of the store of a corpus, which section `data` gives; what is there is verified, what is not is made
    with `parallel` as it is now, in evaluation mode. Collective. DataError for values that are not finite."""
    shape = {"context": stage.context, "mask_documents": stage.mask_documents, "corpus": corpus.describe()}
    key = column_key(name=wanted.name, **wanted.decides, **shape)
    path, job = context.data_dir / f"{wanted.name}-{key[:16]}", context.job
    where = f"column/{stage.name}/{data}/{wanted.name}"

    def known() -> bool:
        if not path.exists():
            return False
        ColumnStore.open(path, key).verify()
        return True

    if not job.agree(f"{where}/known", known):
        began = time.perf_counter()
        context.progress.say(f"data: making the {wanted.name} of {data}, {corpus.store.num_tokens:,} tokens")
        _make(context, parallel, corpus, stage, wanted, path, key)
        job.agree(f"{where}/made", path.exists)  # the others open what rank 0 has finished
        context.note("phase", name=f"{wanted.name} of {data}", seconds=time.perf_counter() - began, stage=stage.name)
    return ColumnStore.open(path, key)


def _make(
    context: Context, parallel: Parallel, corpus: Corpus, stage: Stage, wanted: Wanted, path: Path, key: str
) -> None:
    job, packing = context.job, corpus.open(stage.context, stage.mask_documents)
    parts = _parts(parallel, corpus, stage, wanted, context.recipe.machine.microbatch_rows)
    writer = ColumnWriter(path, wanted.name, key, corpus.store.num_tokens, wanted.column) if job.first else None
    try:
        while True:
            mine = list(islice(parts, TOGETHER))
            everybody = [part for parts in job.everybody(mine) for part in parts]
            _require_finite(everybody, wanted, corpus)
            if writer is not None:
                _write(writer, packing, everybody, stage.context, wanted.column)
            if len(mine) < TOGETHER:  # as on every rank
                break
        if writer is not None:
            writer.finish()
    finally:
        if writer is not None:
            writer.abort()


def _parts(parallel: Parallel, corpus: Corpus, stage: Stage, wanted: Wanted, rows: int) -> Iterator[_Part]:
    """This rank's, one for each microbatch; of ranks that compute the same, one has the values."""
    groups, num_rows = parallel.groups, corpus.open(stage.context, stage.mask_documents).num_rows
    share = groups.data_rank, groups.data_size
    places = np.concatenate([np.asarray(part) for part in groups.axes.columns(stage.context)])
    for index, batch in enumerate(evaluation_batches(corpus, stage.context, stage.mask_documents, *share, rows)):
        first = (index * groups.data_size + groups.data_rank) * rows
        numbers = np.arange(first, max(first, min(first + rows, num_rows)))
        with as_it_was(parallel.parts):
            for part in parallel.parts:
                part.eval()
            found = wanted.of(parallel, parallel.own_part(batch).to(parallel.device))
        if found is None or not parallel.counts:
            yield _Part(numbers[:0], places, np.zeros((0, len(places), *wanted.column.shape), wanted.column.dtype))
        else:
            values = found[: len(numbers)].cpu().numpy().astype(wanted.column.dtype, copy=False)
            yield _Part(numbers, places, values)


def _require_finite(parts: list[_Part], wanted: Wanted, corpus: Corpus) -> None:
    for part in parts:
        if part.values.dtype.kind == "f" and not np.isfinite(part.values).all():
            bad = ~np.isfinite(part.values.reshape(len(part.rows), -1)).all(axis=1)
            raise DataError(
                f"{corpus.store.path}: the {wanted.name} of row {int(part.rows[bad][0])} is not a number; check the "
                f"model that it is taken from, and its precision"
            )


def _write(writer: ColumnWriter, packing: Packing, parts: list[_Part], context: int, column: Column) -> None:
    """Bring the parts of rows together, and the values of places to the tokens that they hold."""
    rows = np.unique(np.concatenate([part.rows for part in parts]))
    if not len(rows):
        return
    values = np.zeros((len(rows), context, *column.shape), column.dtype)
    for part in parts:
        values[np.searchsorted(rows, part.rows)[:, None], part.places[None]] = part.values
    pieces = packing.pieces(rows)
    flat = values.reshape(len(rows) * context, *column.shape)
    writer.write(pieces.starts, pieces.lengths, flat[pieces.places(context)])
