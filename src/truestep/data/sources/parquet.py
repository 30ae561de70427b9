"""Parquet: the text in one column, or whole rows. Shards are runs of row groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from truestep.data.sources.base import Document, Shard
from truestep.data.sources.columns import batch_documents, check_column
from truestep.data.sources.inputs import SHARD_BYTES, File, Inputs, reading
from truestep.errors import DataError
from truestep.storage.store import is_remote


@dataclass(frozen=True)
class ParquetShard:
    """Row groups [start, stop) of a file; stop None is the end."""

    file: File
    text_field: str | None
    start: int = 0
    stop: int | None = None
    size: int = 0

    @property
    def name(self) -> str:
        return self.file.url if self.start == 0 else f"{self.file.url}@{self.start}"

    @property
    def stamp(self) -> str:
        return self.file.stamp

    def documents(self) -> Iterator[Document]:
        url = self.file.url
        with _open(self.file) as parquet:
            check_column(parquet.schema_arrow, self.text_field, url)
            stop = parquet.num_row_groups if self.stop is None else self.stop
            row = sum(parquet.metadata.row_group(g).num_rows for g in range(self.start))
            groups = range(self.start, stop)
            columns = None if self.text_field is None else [self.text_field]
            try:
                for batch in parquet.iter_batches(1024, row_groups=list(groups), columns=columns):
                    yield from batch_documents(batch, self.text_field, url, row)
                    row += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{url} is damaged after row {row}: {error}; fetch or write it again.") from error


@dataclass(frozen=True)
class ParquetSource:
    """options: include and exclude (patterns for folders and globs)."""

    path: Inputs
    text_field: str | None
    include: tuple[str, ...] = ("*.parquet",)
    exclude: tuple[str, ...] = ()

    @property
    def notes(self) -> dict[str, str]:
        return {}

    def shards(self) -> list[Shard]:
        files = self.path.files(self.include, self.exclude)
        return [shard for file in files for shard in file_shards(file, self.text_field)]


def file_shards(file: File, text_field: str | None, shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """A local file is cut between row groups; a remote one is a single shard."""
    if is_remote(file.url):
        return [ParquetShard(file, text_field)]
    shards: list[Shard] = []
    start, size = 0, 0
    with _open(file) as parquet:
        check_column(parquet.schema_arrow, text_field, file.url)
        for group in range(parquet.num_row_groups):
            size += parquet.metadata.row_group(group).total_byte_size
            if size >= shard_bytes or group == parquet.num_row_groups - 1:
                shards.append(ParquetShard(file, text_field, start, group + 1, size))
                start, size = group + 1, 0
    return shards


@contextmanager
def _open(file: File) -> Iterator[pq.ParquetFile]:
    with reading(file.url), file.here() as path:
        try:
            parquet = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise DataError(f"{file.url} is not a Parquet file: {error}; fetch or write it again.") from error
        with parquet:
            yield parquet
