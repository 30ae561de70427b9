"""Reading a recipe: TOML, a mapping or a Recipe, with overrides; everything that is wrong with it is said at once."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from truestep.errors import RecipeError
from truestep.recipe import checks
from truestep.recipe.dump import dump, mapping_of
from truestep.recipe.overrides import apply
from truestep.recipe.problems import Problem, shape_problems, unaffected
from truestep.recipe.recipe import Recipe
from truestep.recipe.section import Section

__all__ = ["dump", "json_schema", "load"]


def load(source: str | os.PathLike[str] | Mapping[str, Any] | Recipe, overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe. `source` is a path of a TOML file, TOML text (with a line break), a mapping, or a Recipe.
    `overrides` are "path=value" (see truestep.recipe.overrides). Raises RecipeError with one sentence for each problem:
    file, field, value, remedy."""
    raw, origin = _read(source)
    sentences: list[str] = []
    set_paths: list[str] = []
    for override in overrides:
        try:
            set_paths.append(apply(raw, override))
        except ValueError as error:
            sentences.append(f"--set {override} {error}")
    found, recipe = shape_problems(raw)
    if recipe is not None:
        found = found + unaffected(checks.problems(recipe), found)
    sentences += [_sentence(problem, origin, set_paths) for problem in found]
    if sentences or recipe is None:
        raise RecipeError([sentence.replace("\n", "\\n") for sentence in sentences])
    return recipe


def json_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a recipe, for editors."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return dialect | Recipe.model_json_schema() | {"title": "truestep recipe"}


def _sentence(problem: Problem, origin: str, set_paths: list[str]) -> str:
    by_set = any(f"{problem.path}.".startswith(f"{path}.") for path in set_paths)
    return f"{'--set' if by_set else origin}: {problem.path} {problem.text}"


def _read(source: str | os.PathLike[str] | Mapping[str, Any] | Recipe) -> tuple[dict[str, Any], str]:
    """A copy of the raw recipe, and what to call it in messages."""
    if isinstance(source, Recipe):
        return mapping_of(source), "recipe"
    if isinstance(source, Mapping):
        return _copy(source), "recipe"
    if isinstance(source, str) and "\n" in source:
        return _parse(source, "recipe"), "recipe"
    path = Path(source)
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise RecipeError([f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8."]) from None
    except OSError as error:
        remedy = "check the path" if isinstance(error, FileNotFoundError) else "give the path of a readable TOML file"
        raise RecipeError([f"{path} cannot be read: {error.strerror}; {remedy}."]) from None
    return _parse(text, str(path)), str(path)


def _copy(value: Any) -> Any:
    """A mapping as TOML would have given it: sections become tables and tuples lists."""
    if isinstance(value, Section):
        return mapping_of(value)
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError([f"{origin} is not TOML: {error}; correct it there."]) from None
