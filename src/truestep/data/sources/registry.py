"""Data sources by name.

To add one: a class with `shards()` and `notes` (see base.py) in a new file here and a line in SOURCES; or, without
touching truestep, a class of your own with `documents()` alone, named in the recipe as source = "package.module:Class".
The class is called with keyword arguments: every entry of `options`, and of `path`, `text_field` and `cache` (a folder
for what it fetches) those that its signature names. In SOURCES `path` arrives as Inputs; in your own class as the
recipe has it.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from truestep.data.sources.base import Document, ShardedSource, WholeSource
from truestep.data.sources.hf_hub import HfHubSource
from truestep.data.sources.hf_saved import HfSavedSource
from truestep.data.sources.inputs import Inputs
from truestep.data.sources.jsonl import JsonlSource
from truestep.data.sources.parquet import ParquetSource
from truestep.data.sources.python_stdlib import PythonStdlibSource
from truestep.data.sources.text import TextSource
from truestep.data.sources.tokenised import MegatronSource, NpySource
from truestep.errors import DataError
from truestep.imports import is_import_path, load_object
from truestep.recipe.data import DataSection

SOURCES: dict[str, Callable[..., ShardedSource]] = {
    "text": TextSource,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "hf-saved": HfSavedSource,
    "hf-hub": HfHubSource,
    "python-stdlib": PythonStdlibSource,
    "megatron": MegatronSource,
    "npy": NpySource,
}


def open_source(section: DataSection, cache: Path) -> ShardedSource:
    """The source that a data section describes. `cache` is a folder for what has to be fetched.
    DataError for an unknown kind, and for options that the source lacks or would not use."""
    paths = [section.path] if isinstance(section.path, str) else section.path
    if is_import_path(section.source):
        factory = load_object(section.source, "data source")
        path: Any = section.path
    elif section.source in SOURCES:
        factory = SOURCES[section.source]
        path = None if paths is None else Inputs(tuple(paths), dict(section.storage_options), cache)
    else:
        raise DataError(
            f'data source {section.source!r} is unknown; use {", ".join(SOURCES)} or "package.module:Class".'
        )
    source = factory(**_arguments(section, factory, path, cache))
    return source if isinstance(source, ShardedSource) else WholeSource(source, section.source)


def read(source: ShardedSource) -> Iterator[Document]:
    """All documents in order."""
    for shard in source.shards():
        yield from shard.documents()


def _arguments(section: DataSection, factory: Callable[..., Any], path: Any, cache: Path) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = dict(section.options)
    if path is not None:
        given["path"] = path
    if "text_field" in section.model_fields_set:
        given["text_field"] = section.text_field
    unused = [name for name in given if name not in parameters and not takes_any]
    if unused:
        takes = ", ".join(n for n in parameters if n not in ("cache", "path", "text_field")) or "none"
        raise DataError(f"source {section.source!r} does not use {unused[0]!r}; remove it (its options: {takes}).")
    if "text_field" in parameters:
        given["text_field"] = section.text_field
    if "cache" in parameters:
        given["cache"] = cache
    needed = [
        n for n, p in parameters.items() if p.default is p.empty and n not in given and p.kind is not p.VAR_KEYWORD
    ]
    if needed:
        place = "`path`" if needed[0] == "path" else f"options.{needed[0]}"
        raise DataError(f"source {section.source!r} needs {place}; add it to the data section.")
    return given
