"""Samples: rows of a corpus that are not plain text, as ids with a role for each; and how rows become them.

A *unit* is a list of samples that must stay together in one row of a batch: one for supervised fine-tuning, the chosen
and the rejected answer for preferences. The formats are in truestep.data.chat.formats.
"""

from collections.abc import Iterator
from typing import Any

from truestep.data.chat.formats import Renderer
from truestep.data.chat.units import EARLIER, LAST, NO_LOSS, RowError, Sample, Unit
from truestep.data.tokenizer import Tokenizer
from truestep.recipe.data import FIELDS, DataSection

__all__ = ["EARLIER", "LAST", "NO_LOSS", "RowError", "Sample", "Unit", "render", "row_text"]


def render(row: dict[str, Any], section: DataSection, tokenizer: Tokenizer) -> list[Unit]:
    """The units of a row. RowError names what is wrong with the row and the remedy; DataError what is wrong with the
    tokenizer or its template, whatever the row."""
    return Renderer(section, tokenizer).units(row)


def row_text(row: dict[str, Any], section: DataSection) -> str:
    """The text of a row that copies, held-out rows and evaluation texts are told by: all that its fields hold. Half a
    surrogate pair, which `render` refuses, is a question mark here."""
    fields = [row.get(section.fields.get(name, name)) for name in FIELDS[section.format]]
    return "\n".join(_texts(fields)).encode("utf-8", "replace").decode()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif value is not None:
        yield str(value)
