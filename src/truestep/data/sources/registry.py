"""Data sources by name.

To add one: a class with `shards()` and `notes` (see base.py) in a new file here and a line in SOURCES; or, without
touching truestep, a class of your own with `documents()` alone, named in the recipe as source = "package.module:Class".
The class is called with keyword arguments: every entry of `options`, and of `path`, `text_field` (None where the
section's format is one of rows) and `cache` (a folder for what it fetches) those that its signature names. In SOURCES
`path` arrives as Inputs; in your own class as the recipe has it. A source is imported when it is used, so that a build
process loads only what its shards need.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from truestep.data.sources.base import Document, ShardedSource, Source, WholeSource
from truestep.data.sources.inputs import Inputs
from truestep.errors import DataError
from truestep.imports import is_import_path, load_object
from truestep.recipe.data import DataSection

SOURCES = {
    "text": "truestep.data.sources.text:TextSource",
    "jsonl": "truestep.data.sources.jsonl:JsonlSource",
    "parquet": "truestep.data.sources.parquet:ParquetSource",
    "hf-saved": "truestep.data.sources.hf_saved:HfSavedSource",
    "hf-hub": "truestep.data.sources.hf_hub:HfHubSource",
    "python-stdlib": "truestep.data.sources.python_stdlib:PythonStdlibSource",
    "megatron": "truestep.data.sources.tokenised:MegatronSource",
    "npy": "truestep.data.sources.tokenised:NpySource",
}


def open_source(section: DataSection, cache: Path) -> ShardedSource:
    """The source that a data section describes. `cache` is a folder for what has to be fetched.
    DataError for an unknown kind, and for options that the source lacks or would not use."""
    if section.source not in SOURCES and not is_import_path(section.source):
        known = ", ".join(SOURCES)
        raise DataError(f'data source {section.source!r} is unknown; use {known} or "package.module:Class".')
    factory = load_object(SOURCES.get(section.source, section.source), "data source")
    path: Any = section.path
    if section.source in SOURCES and path is not None:
        paths = [path] if isinstance(path, str) else path
        path = Inputs(tuple(paths), dict(section.storage_options), cache)
    source = factory(**_arguments(section, factory, path, cache))
    if isinstance(source, ShardedSource):
        return source
    if not isinstance(source, Source):
        raise DataError(f"source {section.source!r} lacks documents(); see truestep.data.sources.base.Source.")
    return WholeSource(source, section.source)


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
        given["text_field"] = section.text_field if section.format == "text" else None
    if "cache" in parameters:
        given["cache"] = cache
    needed = [
        n for n, p in parameters.items() if p.default is p.empty and n not in given and p.kind is not p.VAR_KEYWORD
    ]
    if needed:
        place = "`path`" if needed[0] == "path" else f"options.{needed[0]}"
        raise DataError(f"source {section.source!r} needs {place}; add it to the data section.")
    return given
