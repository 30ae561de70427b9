"""Writes the tables of fields in docs/guide/recipe.md from the help texts of the recipe: `python docs/fields.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from truestep.recipe.describe import field_words
from truestep.recipe.dump import toml
from truestep.recipe.effect import RULES
from truestep.recipe.paths import section_in
from truestep.recipe.recipe import Recipe
from truestep.recipe.section import Digest, Section, digest_of, members

PAGE = Path(__file__).parent / "guide" / "recipe.md"
BEGIN, END = "<!-- fields: written by docs/fields.py -->", "<!-- end of fields -->"
HEADINGS = {"data": "data.NAME"}
"""Tables whose name is the user's."""


def tables() -> str:
    """All tables, a heading each, in the order of the recipe."""
    return "\n".join(line for path, kind, digest in sections() for line in table(path, kind, digest))


def sections() -> Iterator[tuple[str, type[Section], Digest]]:
    """Every section of a recipe: its heading, its class, and the digest that its fields belong to by default."""
    for name, info in Recipe.model_fields.items():
        yield from _below(HEADINGS.get(name, name), info, "where")


def _below(path: str, info: Any, digest: Digest) -> Iterator[tuple[str, type[Section], Digest]]:
    kind, listed = _section_of(info.annotation)
    if kind is None:
        return
    digest = digest_of(info) or digest
    yield f"[[{path}]]" if listed else f"[{path}]", kind, digest
    for name, inner in kind.model_fields.items():
        yield from _below(f"{path}.{name}", inner, digest)


def _section_of(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section class in a type, and whether it stands in a list of tables."""
    if (direct := section_in(annotation)) is not None:
        return direct, False
    for kind, _ in members(annotation):
        for inner in get_args(kind):
            if isinstance(inner, type) and issubclass(inner, Section):
                return inner, kind.__origin__ is list
    return None, False


def table(path: str, kind: type[Section], digest: Digest) -> Iterator[str]:
    """The heading and the rows of one section."""
    needs = _needs(kind)
    yield from (f"### `{path}`", "", (kind.__doc__ or "").strip(), "")
    yield from ("| field | value | default | class | what it is |", "|---|---|---|---|---|")
    for name, info in kind.model_fields.items():
        words = (info.description or "") + (f" *(only with {needs[name]})*" if name in needs else "")
        row = (f"`{name}`", field_words(info), _default(info), digest_of(info) or digest, words)
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"
    yield ""


def _needs(kind: type[Section]) -> dict[str, str]:
    """Of each field that may be idle, what it needs. A rule over most of a section belongs to its text instead."""
    rules = [rule for rule in RULES.get(kind, ()) if len(rule.fields) < 0.75 * len(kind.model_fields)]
    return {name: f"`{rule.needs}`" if " = " in rule.needs else rule.needs for rule in rules for name in rule.fields}


def _default(info: Any) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return "its own defaults"
    return "not set" if value is None else f"`{toml(value)}`"


def page_with(text: str, body: str) -> str:
    """The page with `body` between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{body}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), tables()))
