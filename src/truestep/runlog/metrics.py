"""Loss and gradient norm of every shard and microbatch: columnar segments that each rank writes and readers merge.

`log/ranks/<attempt>/rank-<rank>-<n>.parquet` holds rows of one stage. A segment is written to a temporary file, synced
and put in place by one rename: readers see it whole or not at all. The newest segment of a rank grows by being replaced
until it is full, so that a flush at every checkpoint does not fill the disk with small files; rows that a crash loses
belong to steps after the last flush, which a resume does again.

Byte-stream split and delta encoding bring a row to 6 bytes in full segments and 13 in segments of 100 rows.
"""

import io
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from truestep.errors import LogError
from truestep.files import publish, writing
from truestep.runlog.log import segments

ROWS = 8192  # of a full segment
_NUMBERS = ("loss_sum", "weight", "grad_norm")
_COUNTS = ("step", "microbatch")
_ENCODING = {name: "DELTA_BINARY_PACKED" for name in _COUNTS} | {name: "BYTE_STREAM_SPLIT" for name in _NUMBERS}
_NAME = re.compile(r"rank-(\d+)-(\d+)\.parquet")


class RankMetrics:
    """One rank's writer. Call `flush` before a checkpoint is committed, `close` at the end."""

    def __init__(self, run_dir: Path | str, attempt: int, rank: int, rows: int = ROWS):
        self._folder = Path(run_dir) / "log" / "ranks" / f"{attempt:04d}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._attempt, self._rank, self._full = attempt, rank, rows
        self._stage, self._part, self._saved = "", 0, (0, 0)  # saved: a segment and its rows
        self._lock = threading.Lock()
        self._rows: list[tuple[int, int, float, float, float]] = []
        if self._path().exists():
            taken = f"{self._path()} exists: attempt {attempt} was already begun by another process"
            raise LogError(f"{taken}; stop that one, then run again")

    def append(self, stage: str, step: int, microbatch: int, loss_sum: float, weight: float, grad_norm: float) -> None:
        """One row: sum of the loss, its weight, and the norm of what this microbatch contributes to the reduction.

        `step` counts from 1 as in step records; plain numbers, so fetch a whole step from the device at once.
        """
        if stage != self._stage:
            self._begin_segment()
            self._stage = stage
        self._rows.append((step, microbatch, loss_sum, weight, grad_norm))
        if len(self._rows) >= self._full:
            self._begin_segment()

    def flush(self) -> None:
        """Make every row so far durable. StorageError if the disk refuses; the segment written before stays whole."""
        self.flushing()()

    def flushing(self) -> Callable[[], None]:
        """What makes every row so far durable, for another thread to do."""
        rows, path, says, reached = list(self._rows), self._path(), self._says(), (self._part, len(self._rows))

        def flush() -> None:
            with self._lock:
                if rows and reached > self._saved:  # else somebody else was quicker, perhaps with more
                    with writing(path, "free space there, then run again"):
                        publish(path, _encoded(_table(rows), says))
                    self._saved = reached

        return flush

    def close(self) -> None:
        """Flush; nothing is held open."""
        self.flush()

    def _begin_segment(self) -> None:
        self.flush()
        if self._rows:
            self._part += 1
        self._rows = []

    def _path(self) -> Path:
        return self._folder / f"rank-{self._rank:05d}-{self._part}.parquet"

    def _says(self) -> dict[str, str]:
        return {"stage": self._stage, "attempt": str(self._attempt), "rank": str(self._rank)}


def _table(rows: Sequence[tuple[int, int, float, float, float]]) -> pa.Table:
    step, microbatch, *numbers = zip(*rows)
    columns = {"step": np.asarray(step, np.int32), "microbatch": np.asarray(microbatch, np.int32)}
    columns |= {name: _narrow(np.asarray(values, np.float64)) for name, values in zip(_NUMBERS, numbers)}
    return pa.table(columns)


def _narrow(values: np.ndarray) -> np.ndarray:
    """As float32 where that loses nothing: most values were born in float32."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    return single if np.array_equal(single.astype(np.float64), values, equal_nan=True) else values


def _encoded(table: pa.Table, says: dict[str, str]) -> bytes:
    file = io.BytesIO()
    coding = {"use_dictionary": False, "column_encoding": _ENCODING, "compression": "zstd", "write_page_checksum": True}
    with pq.ParquetWriter(file, table.schema, write_statistics=False, store_schema=False, **coding) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(says)
    return file.getvalue()


def _read_segment(path: Path) -> tuple[str, pa.Table]:
    """Stage and rows of one segment."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        table, says = file.read(), {key.decode(): value.decode() for key, value in file.metadata.metadata.items()}
        attempt, rank, stage = int(says["attempt"]), int(says["rank"]), says["stage"]
    except (pa.ArrowInvalid, OSError, KeyError, ValueError) as error:
        raise LogError(f"{path} is damaged ({error}); remove it to read the other ranks' rows, or restore it") from None
    columns = {"attempt": np.full(len(table), attempt, np.int32), "rank": np.full(len(table), rank, np.int32)}
    columns |= {name: table[name].to_numpy() for name in _COUNTS}
    columns |= {name: table[name].to_numpy().astype(np.float64) for name in _NUMBERS}
    return stage, pa.table(columns)


def read_metrics(run_dir: Path | str, stage: str | None = None) -> pa.Table:
    """Rows of all ranks and attempts: stage, attempt, rank, step, microbatch, loss_sum, weight, grad_norm (float64).

    Only what the run now stands on: where a later attempt (or a roll-back inside one) starts again at step s, all
    earlier rows of steps >= s are left out. An empty table if no rank wrote any.
    """
    segments(run_dir)  # says so if this is no run directory
    found: dict[str, list[pa.Table]] = {}
    for folder in sorted((Path(run_dir) / "log" / "ranks").glob("*")):
        parts = [(int(m[1]), int(m[2]), path) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
        for _, _, path in sorted(parts):
            name, table = _read_segment(path)
            if stage in (None, name):
                found.setdefault(name, []).append(table)
    merged = [_with_stage(name, _standing(pa.concat_tables(tables))) for name, tables in found.items()]
    return pa.concat_tables(merged) if merged else _SCHEMA.empty_table()


_SCHEMA = pa.schema(
    [("stage", pa.dictionary(pa.int32(), pa.string()))]
    + [(name, pa.int32()) for name in ("attempt", "rank", *_COUNTS)]
    + [(name, pa.float64()) for name in _NUMBERS]
)


def _with_stage(stage: str, table: pa.Table) -> pa.Table:
    labels = pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int32), [stage])
    return pa.table([labels, *table.columns], schema=_SCHEMA)


def _standing(table: pa.Table) -> pa.Table:
    """Leave out rows that were done again. Rows come ordered by attempt, rank and writing."""
    attempt, rank, step, microbatch = (table[name].to_numpy() for name in ("attempt", "rank", *_COUNTS))
    same = (attempt[1:] == attempt[:-1]) & (rank[1:] == rank[:-1])
    back = (step[1:] < step[:-1]) | ((step[1:] == step[:-1]) & (microbatch[1:] <= microbatch[:-1]))
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    rewinds = np.concatenate([[0], np.cumsum(same & back)])
    life = rewinds - np.repeat(
        rewinds[starts], np.diff(starts, append=len(step))
    )  # roll-backs before this row, in its file
    _, group = np.unique(attempt.astype(np.int64) << 32 | life, return_inverse=True)
    first = np.full(group.max() + 1, np.iinfo(np.int32).max)
    np.minimum.at(first, group, step)
    later = np.append(np.minimum.accumulate(first[::-1])[::-1][1:], np.iinfo(np.int32).max)
    return table.filter(pa.array(step < later[group]))
