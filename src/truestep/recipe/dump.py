"""Writing a recipe: TOML with every value, its type in a comment, that loads to an equal recipe."""

import json
import re
from collections.abc import Iterator
from datetime import date, datetime, time
from typing import Any

from pydantic.fields import FieldInfo

from truestep.recipe.describe import field_words
from truestep.recipe.effect import unused
from truestep.recipe.paths import items, join
from truestep.recipe.recipe import Recipe
from truestep.recipe.section import Section


def mapping_of(section: Section) -> dict[str, Any]:
    """The fields that were given, as TOML has them: a recipe loaded from this mapping is equal."""
    return section.model_dump(exclude_unset=True, exclude_none=True)


def dump(recipe: Recipe) -> str:
    """The resolved recipe as TOML: every field with its type in a comment. Fields that have no value or no effect stand
    as comments alone. `load` of it is equal to `recipe`, with the same digests."""
    lines = ["# A resolved truestep recipe: every value, its type behind it. It runs as it is."]
    lines += _tables(recipe, "")
    return "\n".join(lines) + "\n"


def _tables(section: Section, path: str) -> Iterator[str]:
    """The lines of one table and of those below it: plain values first, as TOML wants it."""
    fields, idle = type(section).model_fields, unused(section)
    below: list[tuple[str, Any]] = []
    for name, value in section:
        if name in idle and name not in section.model_fields_set:
            yield from _idle(name, fields[name], value, idle[name].needs)
        elif isinstance(value, Section) or (path == "" and items(value)):
            below.append((name, value))
        elif value is None:
            yield f"# {name}: {field_words(fields[name])}; not set"
        else:
            yield _line(name, fields[name], section)
    for name, value in below:
        yield from _below(join(path, _key(name)), value)


def _idle(name: str, info: FieldInfo, value: Any, needs: str) -> Iterator[str]:
    yield f"# {name}: {field_words(info)}; not used, it needs {needs}"
    if isinstance(value, Section):
        for inner, inner_info in type(value).model_fields.items():
            yield from _idle(f"{name}.{inner}", inner_info, None, needs)


def _below(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Section):
        yield from ("", f"[{path}]")
        yield from _tables(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _below(join(path, _key(key)), item)
    else:
        for item in value:
            yield from ("", f"[[{path}]]")
            yield from _tables(item, path)


def _line(name: str, info: FieldInfo, section: Section) -> str:
    shown = section.model_dump(include={name}, exclude_none=True)[name]
    return f"{_key(name)} = {toml(shown)}  # {field_words(info)}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


def toml(value: Any) -> str:
    """One value as TOML, tables inline."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case datetime() | date() | time():
            return value.isoformat()
        case list() | tuple():
            return "[" + ", ".join(map(toml, value)) + "]"
        case dict():
            pairs = ", ".join(f"{_key(str(key))} = {toml(item)}" for key, item in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
        case _:
            raise TypeError(f"{value!r}, a {type(value).__name__}, which TOML does not have")
