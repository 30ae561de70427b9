"""Fingerprints of every tensor after some steps, in columnar segments that rank 0 writes.

A `digest` record says one text for all tensors of a step; where two runs differ in it, the rows of
`log/digests/<attempt>/<n>.parquet` say in which tensors. A segment is put in place whole by one rename, like those of
`runlog.metrics`, and the newest one is replaced until it is full. Rows that a crash loses belong to steps that a resume
does again.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from truestep.errors import LogError
from truestep.files import publish, writing

ROWS = 65_536  # of a full segment
Kind = Literal["gradient", "state"]
KINDS: tuple[Kind, Kind] = ("gradient", "state")


class DigestLog:
    """The writer of one attempt. Call `flush` before a checkpoint is committed, `close` at the end."""

    def __init__(self, run_dir: Path | str, attempt: int, rows: int = ROWS):
        self._folder = _folder(run_dir, attempt)
        self._full = rows
        self._part, self._saved = 0, 0
        self._rows: list[tuple[str, int, Kind, str, int]] = []

    def append(self, stage: str, step: int, kind: Kind, values: Mapping[str, int]) -> None:
        """Fingerprints (int64) of all tensors by name, once `step` steps are done."""
        for name, value in values.items():
            self._rows.append((stage, step, kind, name, value))
        if len(self._rows) >= self._full:
            self.flush()
            self._rows, self._saved, self._part = [], 0, self._part + 1

    def flush(self) -> None:
        """Make every row so far durable. StorageError if the disk refuses; the segment written before stays whole."""
        if len(self._rows) == self._saved:
            return
        path = self._folder / f"{self._part:05d}.parquet"
        with writing(path, "free space there, then run again"):
            self._folder.mkdir(parents=True, exist_ok=True)
            publish(path, _encoded(self._rows))
        self._saved = len(self._rows)

    def close(self) -> None:
        """Flush; nothing is held open."""
        self.flush()


def read_digests(run_dir: Path | str, attempt: int, stage: str, step: int) -> dict[Kind, dict[str, int]]:
    """What an attempt wrote of one step, by kind and name; of a step that it did twice, the last. Empty if nothing."""
    found: dict[Kind, dict[str, int]] = {}
    wanted = [("stage", "=", stage), ("step", "=", step)]
    for path in sorted(_folder(run_dir, attempt).glob("*.parquet")):
        try:
            table = pq.read_table(path, filters=wanted, page_checksum_verification=True)
            rows = table.select(["kind", "name", "digest"]).to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise LogError(f"{path} is damaged ({error}); restore it, or remove it to go without its digests") from None
        for row in rows:
            found.setdefault(row["kind"], {})[row["name"]] = row["digest"]
    return found


def _folder(run_dir: Path | str, attempt: int) -> Path:
    return Path(run_dir) / "log" / "digests" / f"{attempt:04d}"


def _encoded(rows: list[tuple[str, int, Kind, str, int]]) -> bytes:
    stage, step, kind, name, digest = zip(*rows)
    columns = {"stage": stage, "step": np.asarray(step, np.int32), "kind": kind, "name": name}
    table = pa.table(columns | {"digest": np.asarray(digest, np.int64)})
    file = io.BytesIO()
    coding = {"use_dictionary": ["stage", "kind", "name"], "compression": "zstd", "write_page_checksum": True}
    with pq.ParquetWriter(file, table.schema, **coding) as writer:
        writer.write_table(table)
    return file.getvalue()
