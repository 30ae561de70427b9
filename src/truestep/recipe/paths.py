"""Paths of fields, "stages.base.optim.lr": an item of a list is addressed by its name, else by its index."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from truestep.recipe.section import Section, members

Keys = tuple[str | int, ...]


class Place(NamedTuple):
    """What a path points to: the field it belongs to, the type of the value there, and the section that holds it."""

    info: FieldInfo | None
    annotation: Any
    section: type[Section] | None


def join(path: str, key: str | int) -> str:
    """`path` one level deeper."""
    return f"{path}.{key}" if path else str(key)


def element_name(item: Any, index: int) -> str | int:
    """The name of an item of a list, from a section or a mapping; its index where it has none."""
    name = dict(item).get("name") if isinstance(item, dict | Section) else None
    return name if isinstance(name, str) else index


def child_keys(raw: Any) -> Collection[str | int]:
    """The keys of a table or the indices of a list in the raw recipe; nothing for a plain value."""
    return raw.keys() if isinstance(raw, dict) else range(len(raw)) if isinstance(raw, list) else ()


def show(keys: Sequence[str | int], raw: Any) -> str:
    """The path of `keys` into the raw recipe, with the names of stages in place of their indices."""
    path = ""
    for key in keys:
        inner = raw[key] if key in child_keys(raw) else None
        path = join(path, element_name(inner, key) if isinstance(key, int) else key)
        raw = inner
    return path


def walk(section: Section, path: str = "") -> Iterator[tuple[str, Section]]:
    """The section and all sections in it, each with its path."""
    yield path, section
    for name, value in section:
        for key, item in items(value):
            yield from walk(item, join(path, name) if key is None else join(join(path, name), key))


def items(value: Any) -> list[tuple[str | int | None, Section]]:
    """The sections that the value of a field consists of, each with its key below it (None: the value itself)."""
    if isinstance(value, Section):
        return [(None, value)]
    if isinstance(value, dict):
        return [(key, item) for key, item in value.items() if isinstance(item, Section)]
    if isinstance(value, list):
        return [(element_name(item, i), item) for i, item in enumerate(value) if isinstance(item, Section)]
    return []


def section_in(annotation: Any) -> type[Section] | None:
    """The section class among the alternatives of a type."""
    found = (kind for kind, _ in members(annotation) if isinstance(kind, type) and issubclass(kind, Section))
    return next(found, None)


def place(root: type[Section], keys: Sequence[str | int]) -> Place:
    """What `keys` point to below `root`. An unknown field has no info; below it nothing is known."""
    here = Place(None, root, None)
    for key in keys:
        section = section_in(here.annotation)
        if section is not None:
            info = section.model_fields.get(str(key))
            here = Place(info, info.annotation if info else None, section)
        else:
            origin = list if isinstance(key, int) else dict
            found = [get_args(kind)[-1] for kind, _ in members(here.annotation) if get_origin(kind) is origin]
            here = Place(here.info, found[0] if found else None, here.section)
    return here
