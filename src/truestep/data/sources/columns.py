"""Arrow data (Parquet files, saved Hugging Face datasets): a column in which every row must be text, or whole rows."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from truestep.data.sources.base import Document
from truestep.errors import DataError


def check_column(schema: pa.Schema, text_field: str | None, url: str) -> None:
    """DataError if the file has no such column; None stands for whole rows."""
    if text_field is not None and text_field not in schema.names:
        raise DataError(f"{url} has no column {text_field!r} (columns: {', '.join(schema.names)}); set `text_field`.")


def batch_documents(batch: pa.RecordBatch, text_field: str | None, url: str, first_row: int) -> Iterator[Document]:
    """The rows of a batch: those of its column of text, or, without one, whole, as Python objects."""
    if text_field is not None:
        yield from column_documents(batch.column(text_field), text_field, url, first_row)
        return
    for number, row in enumerate(batch.to_pylist(), first_row):
        yield Document(None, None, f"{url}, row {number}", row)


def column_documents(column: pa.Array, text_field: str, url: str, first_row: int) -> Iterator[Document]:
    """The rows of one chunk of the column; `first_row` is its place in the file. DataError names the row that holds
    null, NaN or anything but text."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or _is_view(column.type)):
        raise DataError(_wrong(url, text_field, first_row, _first_bad(column), column))
    if column.null_count:
        raise DataError(_wrong(url, text_field, first_row, pc.index(column.is_null(), True).as_py(), column))
    for row, text in enumerate(column.to_pylist(), first_row):
        yield Document(text, None, f"{url}, row {row}")


def _is_view(kind: pa.DataType) -> bool:
    return pa.types.is_string_view(kind)


def _first_bad(column: pa.Array) -> int:
    """The row to show of a column that is not text: the first null or NaN, the usual cause."""
    missing = column.is_null(nan_is_null=True) if pa.types.is_floating(column.type) else column.is_null()
    return max(0, pc.index(missing, True).as_py())


def _wrong(url: str, text_field: str, first_row: int, bad: int, column: pa.Array) -> str:
    held = column[bad].as_py()
    shown = "null" if held is None else "NaN" if held != held else repr(held)[:40]
    return (
        f"{url}, row {first_row + bad}: column {text_field!r} (type {column.type}) holds {shown}, not text; "
        f"drop or repair such rows, or set `text_field` to a column of text."
    )
