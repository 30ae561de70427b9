"""The one global order of rows, the same for every world size, and how a rank gets its microbatches of it.

Three counters, each a whole number:

    trained row   what the run has trained on: step k takes trained rows [R(k), R(k+1)), R being the batch schedule
    global row    the same with skipped ranges counted in; a mixture says which corpus gives it
    corpus row    counts a corpus's own rows over epochs; epoch and place follow by division, the row by permutation

The state is the next trained row, the skipped ranges and a fingerprint. Nothing else moves, so nothing can drift:
ranks, prefetching and restarts only ask for other row numbers.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from truestep.data.blocks import digest
from truestep.data.columns import ColumnStore, WithColumns
from truestep.data.mixture import Mixture
from truestep.data.order import Permutation
from truestep.data.packing import NO_COLUMNS, Column, Packing, Rows, open_packing
from truestep.data.sample_packing import SamplePacking, Supervision
from truestep.data.sample_store import SampleStore, Store
from truestep.data.shares import Shares
from truestep.errors import DataError
from truestep.files import canonical
from truestep.numerics.batch import IGNORE, Batch

_ORDER = 1
"""Version of the order of rows; part of the fingerprint, so that a changed rule is never resumed into silently."""


@dataclass(frozen=True)
class Corpus:
    """One store in a mixture. `max_epochs`: passes after which it gives no more rows. `index_folder`: where best-fit
    keeps its index of rows, by default the store's own folder. `supervision`: of samples, which are always put into
    rows whole (`packing` is for text). `columns`: further ones of its rows."""

    store: Store
    weight: float = 1.0
    max_epochs: float | None = None
    packing: str = "split"
    too_long: str = "truncate"
    index_folder: Path | None = None
    supervision: Supervision = field(default_factory=Supervision)
    columns: tuple[ColumnStore, ...] = ()

    def open(self, context: int, mask_documents: bool) -> Packing:
        packing = self._packing(context, mask_documents)
        return WithColumns(packing, self.columns, context) if self.columns else packing

    def describe(self) -> dict[str, Any]:
        fields = {"store": self.store.fingerprint, "weight": float(self.weight), "max_epochs": self.max_epochs}
        if isinstance(self.store, SampleStore):
            fields |= {"too_long": self.too_long, "supervision": asdict(self.supervision)}
        else:
            fields |= {"packing": self.packing} | ({"too_long": self.too_long} if self.packing == "best-fit" else {})
        return fields | ({"columns": {one.name: one.key for one in self.columns}} if self.columns else {})

    def _packing(self, context: int, mask_documents: bool) -> Packing:
        if isinstance(self.store, SampleStore):
            return SamplePacking(self.store, context, self.too_long, self.supervision, self.index_folder)
        return open_packing(self.packing, self.store, context, mask_documents, self.too_long, self.index_folder)


class Loader:
    """Rows of a mixture of corpora by number. `skip` holds ranges of global rows that are not trained on."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        context: int,
        seed: int,
        mask_documents: bool = True,
        skip: Sequence[tuple[int, int]] = (),
    ):
        if not corpora:
            raise DataError("a loader needs at least one corpus; name data in the stage")
        self.context, self.seed = context, seed
        self.packings = [corpus.open(context, mask_documents) for corpus in corpora]
        self.num_rows_per_epoch = [packing.num_rows for packing in self.packings]
        self._columns = _columns(corpora, self.packings)
        caps = [_cap(corpus, num_rows) for corpus, num_rows in zip(corpora, self.num_rows_per_epoch)]
        self._mixture = Mixture([corpus.weight for corpus in corpora], caps)
        what = {"corpora": [corpus.describe() for corpus in corpora], "context": context, "seed": seed}
        self.fingerprint = digest(canonical(what | {"mask_documents": mask_documents, "order": _ORDER}))
        self._set_skip(list(skip))

    @property
    def num_rows(self) -> int | None:
        """Rows that can be trained on, None if there is no end."""
        total = self._mixture.num_rows
        return None if total is None else total - sum(min(b, total) - min(a, total) for a, b in self.skipped)

    def rows(self, global_rows: np.ndarray) -> Batch:
        """The rows of these numbers (int64, any order, at least one) as a batch on the CPU."""
        parts, places = [], []
        for where, packing, indices in self._find(global_rows):
            parts.append(packing.rows(indices))
            places.append(where)
        if len(parts) == 1:
            return _batch(parts[0])
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        first, *others = map(_batch, parts)
        return first.map(lambda *fields: torch.cat(fields)[back], *others)

    def padding(self, rows: int) -> Batch:
        """Rows without a target."""
        return padding(rows, self.context, self._columns)

    def targets(self, global_rows: np.ndarray) -> int:
        """How many targets these rows hold together; from document borders alone, so any rank can ask for all rows."""
        return sum(packing.targets(indices) for _, packing, indices in self._find(global_rows))

    def global_rows(self, start: int, stop: int) -> np.ndarray:
        """Trained rows [start, stop) to global rows: the skipped ranges are stepped over."""
        trained = np.arange(start, stop)
        return trained + self._skipped_before[np.searchsorted(self._skip_at, trained, side="right")]

    def skip(self, start: int, stop: int, next_row: int) -> None:
        """From now on leave out global rows [start, stop). They must lie ahead of trained row `next_row`: what was
        trained on cannot be untrained. Close a Prefetcher first and make a new one: it has read ahead."""
        if not int(self.global_rows(next_row, next_row + 1)[0]) <= start < stop:
            raise DataError(
                f"rows {start} to {stop} cannot be skipped: row {next_row} of the run is next; skip later ones"
            )
        self._set_skip([*self.skipped, (start, stop)])

    def go_back(self, state: dict[str, Any], left_out: tuple[int, int] | None = None) -> int:
        """Take over a state of before; returns the next trained row. What is left out by now stays left out, and global
        rows `left_out`, from the first to before the last, are too, as far as they lie ahead."""
        ranges = [*self.skipped, *([left_out] if left_out else [])]
        next_row = self.restore(state)
        ahead = int(self.global_rows(next_row, next_row + 1)[0])
        for start, stop in ranges:
            if stop > ahead:
                self.skip(max(start, ahead), stop, next_row)
        return next_row

    def state(self, next_row: int) -> dict[str, Any]:
        """What a checkpoint holds: trained rows [0, next_row) are done."""
        return {"next_row": next_row, "skipped": [list(r) for r in self.skipped], "fingerprint": self.fingerprint}

    def check(self, state: dict[str, Any]) -> None:
        """Raises DataError if `state` is of other data, another mixture, context, seed or packing."""
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the checkpoint was made on other data (fingerprint {state['fingerprint']}, here {self.fingerprint}); "
                "resume with the same stores, weights, packing, context and seed, or start a new run"
            )

    def restore(self, state: dict[str, Any]) -> int:
        """Take over a state's skipped ranges; returns the next trained row."""
        self.check(state)
        self._set_skip([(a, b) for a, b in state["skipped"]])
        return state["next_row"]

    def _set_skip(self, ranges: list[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if not 0 <= start < stop:
                raise DataError(f"skipped range {start} to {stop} is not a range of rows")
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], stop)
            else:
                merged.append((start, stop))
        self.skipped = merged
        lengths = np.array([0] + [b - a for a, b in merged], dtype=np.int64)
        self._skipped_before = np.cumsum(lengths)
        self._skip_at = np.array([a for a, _ in merged], dtype=np.int64) - self._skipped_before[:-1]

    def _find(self, global_rows: np.ndarray) -> Iterator[tuple[np.ndarray, Packing, np.ndarray]]:
        """(places in `global_rows`, packing, its row numbers) for each corpus that gives some."""
        sources, locals_ = self._mixture.locate(global_rows)
        for source in np.unique(sources).tolist():
            where, packing = np.flatnonzero(sources == source), self.packings[source]
            epochs, indices = np.divmod(locals_[where], packing.num_rows)
            for epoch in np.unique(epochs).tolist():
                now = epochs == epoch
                indices[now] = Permutation(packing.num_rows, self.seed, epoch, source)[indices[now]]
            yield where, packing, indices


def microbatches(loader: Loader, start: int, stop: int, rank: int, world: int, rows: int) -> list[Batch]:
    """This rank's part of the global batch of trained rows [start, stop): microbatch j holds rows [start + j rows,
    start + (j + 1) rows) and goes to rank j % world. All ranks get equally many; the last may be padding."""
    num_microbatches = _num_microbatches(start, stop, rows)
    mine = list(range(rank, num_microbatches, world))
    return chosen(loader, start, stop, rows, mine, -(-num_microbatches // world))


def chosen(loader: Loader, start: int, stop: int, rows: int, mine: Sequence[int], count: int) -> list[Batch]:
    """The microbatches of these numbers, with padding behind them up to `count`."""
    batches: list[Batch] = []
    if mine:
        numbers = loader.global_rows(start, stop).reshape(_num_microbatches(start, stop, rows), rows)[list(mine)]
        batches = _split(loader.rows(numbers.reshape(-1)), rows)
    return batches + [loader.padding(rows)] * (count - len(mine))


def _num_microbatches(start: int, stop: int, rows: int) -> int:
    if (stop - start) % rows:
        raise DataError(
            f"a step of {stop - start} rows is not a whole number of microbatches of {rows} rows; "
            "change batch_tokens or machine.microbatch_rows"
        )
    return (stop - start) // rows


class Schedule(Protocol):
    """What the loader needs of a batch schedule (truestep.recipe.batch_schedule.BatchSchedule)."""

    @property
    def steps(self) -> int: ...

    def rows(self, step: int) -> tuple[int, int]: ...


class Prefetcher:
    """Iterates over (step, this rank's microbatches, targets of the whole global batch) from `start_step` to the end.

    `depth` steps are prepared ahead by one thread, 0 means none and no thread; the stream is the same. The number of
    targets is the same on every rank and needs no communication. An error in the thread is raised by `next`. `state`
    counts the steps that were handed out, so save it after a step was trained on. Use as a context manager, or call
    `close`.
    """

    def __init__(
        self,
        loader: Loader,
        schedule: Schedule,
        rank: int,
        world: int,
        rows: int,
        depth: int,
        start_step: int = 0,
        pin: bool = False,
        shares: Shares | None = None,
    ):
        """`pin`: page-locked memory, from which copies to a GPU run beside its work. `shares`: which microbatches are
        this rank's, by default those that it would have among `world` alike; after a change of it, call `restart`."""
        self._loader, self._schedule, self._pin = loader, schedule, pin
        self._part, self._depth, self._shares = (rank, world, rows), depth, shares
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future] = deque()
        for step in range(start_step, schedule.steps):
            _num_microbatches(*schedule.rows(step), rows)
        self.restart(start_step)

    def restart(self, step: int) -> None:
        """Go on at `step`, with the ranges that the loader leaves out by now. Call `close` before the loader changes:
        the thread reads ahead."""
        self.close()
        loader, schedule = self._loader, self._schedule
        self._next_step = self._next_fetch = step
        self._next_row = schedule.rows(step)[0] if step < schedule.steps else self._rows_total()
        if loader.num_rows is not None and self._rows_total() > loader.num_rows:
            raise DataError(
                f"the stage needs {self._rows_total()} rows of {loader.context} tokens, its data gives "
                f"{loader.num_rows} under max_epochs; raise max_epochs, add data, or train on fewer tokens"
            )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data") if self._depth else None
        for _ in range(self._depth):
            self._fetch_ahead()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> tuple[int, list[Batch], int]:
        if self._next_step >= self._schedule.steps:
            self.close()
            raise StopIteration
        step = self._next_step
        if self._pool is None:
            batches, num_targets = self._load(step)
        else:
            batches, num_targets = self._ahead[0].result()  # stays first if it raises: no step is left out
            self._ahead.popleft()
            self._fetch_ahead()
        self._next_step, self._next_row = step + 1, self._schedule.rows(step)[1]
        return step, batches, num_targets

    def state(self) -> dict[str, Any]:
        return self._loader.state(self._next_row)

    def close(self) -> None:
        """Stop the thread; what it prepared is thrown away."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _rows_total(self) -> int:
        return self._schedule.rows(self._schedule.steps - 1)[1] if self._schedule.steps else 0

    def _fetch_ahead(self) -> None:
        if self._pool is not None and self._next_fetch < self._schedule.steps:
            self._ahead.append(self._pool.submit(self._load, self._next_fetch))
            self._next_fetch += 1

    def _load(self, step: int) -> tuple[list[Batch], int]:
        start, stop = self._schedule.rows(step)
        rank, _, rows = self._part
        if self._shares is None or self._shares.even:
            batches = microbatches(self._loader, start, stop, *self._part)
        else:
            mine, count = self._shares.mine(step, rank), self._shares.rounds(step)
            batches = chosen(self._loader, start, stop, rows, mine, count)
        if self._pin:
            batches = [batch.map(torch.Tensor.pin_memory) for batch in batches]
        return batches, self._loader.targets(self._loader.global_rows(start, stop))


def evaluation_batches(
    corpus: Corpus, context: int, mask_documents: bool, rank: int, world: int, rows: int, limit: int = 0
) -> Iterator[Batch]:
    """This rank's microbatches of all rows of a corpus in their own order (`limit` > 0: that many, evenly spaced),
    each once over all ranks; every rank gets equally many, filled up with rows of padding."""
    packing = corpus.open(context, mask_documents)
    num_rows = min(limit, packing.num_rows) if limit else packing.num_rows
    for first in range(rank * rows, -(-num_rows // (rows * world)) * rows * world, rows * world):
        numbers = np.arange(first, min(first + rows, num_rows))
        missing = padding(rows - len(numbers), context, packing.columns)
        if not len(numbers):
            yield missing
            continue
        found = _batch(packing.rows(numbers * packing.num_rows // num_rows))
        yield found.map(lambda *parts: torch.cat(parts), missing) if len(numbers) < rows else found


def padding(rows: int, context: int, columns: Mapping[str, Column] = NO_COLUMNS) -> Batch:
    """Rows without a target, which touch no statistic."""
    tokens_BT = torch.zeros(rows, context, dtype=torch.int64)
    documents_BT = torch.full((rows, context), -1, dtype=torch.int32)
    empty = {name: torch.from_numpy(np.zeros((rows, context, *one.shape), one.dtype)) for name, one in columns.items()}
    return Batch(tokens_BT, torch.full_like(tokens_BT, IGNORE), torch.zeros_like(tokens_BT), documents_BT, empty)


def _columns(corpora: Sequence[Corpus], packings: Sequence[Packing]) -> dict[str, Column]:
    """Those of every packing; DataError where they differ."""
    first = packings[0].columns
    for corpus, packing in zip(corpora, packings):
        if packing.columns != first:
            raise DataError(
                f"{corpus.store.path} gives {', '.join(packing.columns) or 'plain text'}, but {corpora[0].store.path} "
                f"gives {', '.join(first) or 'plain text'}; mix data of one format only"
            )
    return dict(first)


def _cap(corpus: Corpus, num_rows: int) -> int | None:
    if corpus.max_epochs is None:
        return None
    cap = int(Fraction(str(corpus.max_epochs)) * num_rows)
    if not cap:
        raise DataError(f"{corpus.store.path}: max_epochs {corpus.max_epochs} of {num_rows} rows is no row; raise it")
    return cap


def _batch(rows: Rows) -> Batch:
    columns = {name: torch.from_numpy(column) for name, column in rows.columns.items()}
    fields = rows.tokens_BT, rows.labels_BT, rows.positions_BT, rows.documents_BT
    tokens_BT, labels_BT, positions_BT, documents_BT = map(torch.from_numpy, fields)
    return Batch(tokens_BT, labels_BT, positions_BT, documents_BT, columns)


def _split(batch: Batch, rows: int) -> list[Batch]:
    starts = range(0, len(batch.tokens_BT), rows)
    return [batch.map(lambda x, start=start: x[start : start + rows]) for start in starts]
