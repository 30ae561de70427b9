"""`--set path=value`: any field by its path, stages by their name.

The value is read as TOML where it is TOML (3e-4, true, [1, 2], "quoted"), else as text, so most text needs no quotes; a
field for text takes what stands there ("no", 123) as text. `path=` with nothing after it takes the field out."""

import tomllib
from collections.abc import Sequence
from typing import Any

from truestep.recipe.paths import child_keys, element_name, join, place
from truestep.recipe.problems import did_you_mean
from truestep.recipe.recipe import Recipe
from truestep.recipe.section import members


def apply(raw: dict[str, Any], override: str) -> str:
    """Put one override into the raw recipe. Returns the path of what it set: a table that it had to make, else the
    field. Raises ValueError with the end of a sentence."""
    path, equals, text = (part.strip() for part in override.partition("="))
    parts = path.split(".")
    if not equals or not all(parts):
        raise ValueError("is not of the form path=value; write, for example, stages.base.optim.lr=3e-4.")
    here: Any = raw
    keys: list[str | int] = []
    made = path
    for i, part in enumerate(parts):
        outer = ".".join(parts[:i])
        if _is_value(here):
            raise ValueError(f"goes into {outer}, which is a value and has no fields.")
        key = _key(here, part)
        if key is None:
            names = [str(element_name(item, n)) for n, item in enumerate(here)]
            raise ValueError(f"points to {part!r}, which is not in {outer}; {did_you_mean(part, names)}")
        keys.append(key)
        if i == len(parts) - 1:
            break
        if key not in child_keys(here):
            here[key] = {}
            made = min(made, join(outer, part), key=len)
        here = here[key]
    _put(here, keys, text)
    return made


def _is_value(here: Any) -> bool:
    return not isinstance(here, dict | list)


def _put(here: Any, keys: Sequence[str | int], text: str) -> None:
    if text:
        here[keys[-1]] = _value(text, keys)
    elif keys[-1] in child_keys(here):
        del here[keys[-1]]


def _key(here: Any, part: str) -> str | int | None:
    """A key of a table is the part itself; an item of a list is found by its name, else by its index."""
    if not isinstance(here, list):
        return part
    for index, item in enumerate(here):
        if str(element_name(item, index)) == part:
            return index
    return int(part) if part.isdigit() and int(part) < len(here) else None


def _value(text: str, keys: Sequence[str | int]) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    takes_text = any(kind is str for kind, _ in members(place(Recipe, keys).annotation))
    if len(parsed) > 1 or (takes_text and not isinstance(value, str | list | dict)):
        return text
    return value
