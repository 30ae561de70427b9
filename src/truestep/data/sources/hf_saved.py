"""A folder written by `datasets.save_to_disk`, read with pyarrow alone: nothing in it is ever run or unpickled."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from truestep.data.sources.base import Document, Shard
from truestep.data.sources.columns import batch_documents, check_column
from truestep.data.sources.inputs import InputFile, Inputs, reading
from truestep.errors import DataError
from truestep.storage.store import is_remote

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True)
class ArrowShard:
    """One Arrow IPC stream."""

    file: InputFile
    text_field: str | None

    @property
    def name(self) -> str:
        return self.file.url

    @property
    def size(self) -> int:
        return self.file.size

    @property
    def stamp(self) -> str:
        return self.file.stamp

    def documents(self) -> Iterator[Document]:
        url = self.file.url
        row = 0
        with reading(url), self.file.here() as path:
            _check_complete(path, url)
            try:
                with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
                    check_column(stream.schema, self.text_field, url)
                    for batch in stream:
                        yield from batch_documents(batch, self.text_field, url, row)
                        row += batch.num_rows
            except pa.ArrowException as error:
                raise DataError(f"{url} is damaged after row {row}: {error}; save the dataset again.") from error


@dataclass(frozen=True)
class HfSavedSource:
    """options: split, where the folder holds several (a DatasetDict)."""

    path: Inputs
    text_field: str | None
    split: str | None = None

    @property
    def notes(self) -> dict[str, str]:
        return {} if self.split is None else {"split": self.split}

    def shards(self) -> list[Shard]:
        return [ArrowShard(file, self.text_field) for root in self.path.paths for file in self._files(root)]

    def _files(self, root: str) -> list[InputFile]:
        if is_remote(root):
            raise DataError(
                f"{root}: hf-saved reads local folders only; copy the folder here, or use jsonl or parquet."
            )
        folder = _split_folder(Path(root), self.split)
        state = _read_json(folder / "state.json")
        if state.get("_indices_files"):
            raise DataError(f"{folder} was saved with an index file; call flatten_indices() before save_to_disk().")
        names = [entry["filename"] for entry in state["_data_files"]]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder / missing[0]} is missing, though state.json names it; save the dataset again.")
        return [InputFile(str(folder / name), name) for name in names]


def _split_folder(root: Path, split: str | None) -> Path:
    if (root / "state.json").is_file():
        if split is not None:
            raise DataError(f"{root} holds a single dataset, so split={split!r} has no effect; remove the option.")
        return root
    if not (root / "dataset_dict.json").is_file():
        raise DataError(f"{root} is not a folder written by save_to_disk (no state.json, no dataset_dict.json).")
    splits: list[str] = _read_json(root / "dataset_dict.json")["splits"]
    if split is None and len(splits) == 1:
        return root / splits[0]
    if split not in splits:
        raise DataError(f"{root} holds the splits {', '.join(splits)}; set options.split to one of them.")
    return root / split


def _read_json(path: Path) -> dict[str, Any]:
    with reading(str(path)):
        data = path.read_bytes()
    try:
        return json.loads(data)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}; save the dataset again.") from error


def _check_complete(path: Path, url: str) -> None:
    """Arrow reads a stream that was cut between two batches without complaint; the end mark shows that it is whole."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - len(_END_OF_STREAM)))
        if file.read() != _END_OF_STREAM:
            raise DataError(f"{url} is truncated: its Arrow end mark is missing; save the dataset again.")
