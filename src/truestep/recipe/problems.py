"""What is wrong with a recipe: values that do not fit their fields, found all at once and said in words."""

import json
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from truestep.recipe.describe import field_words, type_words
from truestep.recipe.paths import Keys, child_keys, place, section_in, show
from truestep.recipe.recipe import Recipe
from truestep.recipe.section import Section, members

STAND_IN = "stand-in"


@dataclass(frozen=True)
class Problem:
    """`path` names the field, `text` goes on from there. `reads` are the other fields that it rests on: where one of
    them is wrong itself, nothing is said."""

    path: str
    text: str
    reads: tuple[str, ...] = ()


def value_words(value: Any) -> str:
    """A value as it stands in TOML, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The remedy for a wrong name: the nearest right one, else all."""
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(known)}." if known else "there are none."


def shape_problems(raw: dict[str, Any]) -> tuple[list[Problem], Recipe | None]:
    """Every value that does not fit its field, and the recipe with stand-ins for those values, so that what does not
    rest on them can be checked all the same (None where too much is missing)."""
    try:
        return [], Recipe.model_validate(raw)
    except ValidationError as error:
        found = _by_place(error, raw)
    problems = [_problem(keys, errors, raw) for keys, errors in found.items()]
    mended = deepcopy(raw)
    for _ in range(3):  # mending a value can uncover that its section lacks another
        for keys in sorted(found, key=str, reverse=True):
            _mend(mended, keys)
        try:
            return problems, Recipe.model_validate(mended)
        except ValidationError as error:
            found = _by_place(error, mended)
    return problems, None


def problems_in(root: type[Section], raw: dict[str, Any]) -> list[Problem]:
    """Every value that does not fit its field, of another kind of file than a recipe."""
    try:
        root.model_validate(raw)
    except ValidationError as error:
        return [_problem(keys, errors, raw, root) for keys, errors in _by_place(error, raw).items()]
    return []


def _by_place(error: ValidationError, raw: Any) -> dict[Keys, list[ErrorDetails]]:
    """Errors by the keys of the value they are about. Of a value with several types, the errors below it count where
    there are some: they are about the alternative that was meant."""
    places: dict[Keys, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        places.setdefault(_keys(detail, raw), []).append(detail)
    inner = [keys for keys in places if any(len(k) > len(keys) and k[: len(keys)] == keys for k in places)]
    return {keys: details for keys, details in places.items() if keys not in inner}


def _keys(detail: ErrorDetails, raw: Any) -> Keys:
    """pydantic's location without the names of union members in it."""
    keys: list[str | int] = []
    for key in detail["loc"]:
        if key in child_keys(raw):
            raw = raw[key]
            keys.append(key)
    return (*keys, detail["loc"][-1]) if detail["type"] == "missing" else tuple(keys)


def _problem(keys: Keys, errors: list[ErrorDetails], raw: Any, root: type[Section] = Recipe) -> Problem:
    path, here, error = show(keys, raw), place(root, keys), errors[0]
    kind, value = error["type"], value_words(error["input"])
    if kind == "extra_forbidden" and here.section is not None:
        return Problem(path, f"is not a field; {_nearest(str(keys[-1]), here.section)}")
    info = here.info
    about = f" ({info.description})" if info is not None else ""
    words = field_words(info) if info and here.annotation is info.annotation else type_words(here.annotation)
    if kind == "missing":
        return Problem(path, f"is missing; it takes: {words}{about}.")
    if kind == "value_error":
        return Problem(path, f"is {value}: {error['msg'].removeprefix('Value error, ')}{about}.")
    if kind == "string_pattern_mismatch":
        words = f"text that matches {error.get('ctx', {}).get('pattern')}"
    return Problem(path, f"is {value}; it takes: {words}{about}.")


def _nearest(name: str, section: type[Section]) -> str:
    """The remedy for an unknown field: the same name one level down, else the nearest one here."""
    known = list(section.model_fields)
    below = {f: section_in(info.annotation) for f, info in section.model_fields.items()}
    deeper = [f"{f}.{name}" for f, inner in below.items() if inner is not None and name in inner.model_fields]
    return f"did you mean {deeper[0]!r}?" if deeper else did_you_mean(name, known)


def _mend(mended: Any, keys: Keys) -> None:
    """Take the value at `keys` out, or put a stand-in where its field needs one."""
    *outer, key = keys
    raw: Any = reduce(getitem, outer, mended)
    here = place(Recipe, keys)
    info = here.info
    if isinstance(key, int) or (info is not None and info.is_required() and here.annotation is info.annotation):
        raw[key] = _stand_in(here.annotation)
    else:
        raw.pop(key, None)


def _stand_in(annotation: Any) -> Any:
    kind = members(annotation)[0][0]
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) is list:
        return [_stand_in(get_args(kind)[0])]
    return {int: 1, float: 1.0, str: STAND_IN, bool: False}.get(kind, {})


def unaffected(problems: Iterable[Problem], wrong: list[Problem]) -> list[Problem]:
    """Those of `problems` that rest on no field that is `wrong`, nor on anything in or around it."""
    marked = [problem.path for problem in wrong] + [f"stages.{STAND_IN}"]
    return [p for p in problems if not any(_overlap(a, b) for a in (p.path, *p.reads) for b in marked)]


def _overlap(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")
