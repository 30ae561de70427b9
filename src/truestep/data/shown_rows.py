"""Rows as a model sees them, for people: what the places hold, which tokens carry loss, where documents begin."""

from dataclasses import dataclass

import numpy as np

from truestep.data.packing import IGNORE, Rows
from truestep.data.tokenizer import Tokenizer

_CONTEXT = 4
"""Tokens before one that decide how it is spelt (spaces, parts of a character)."""
_LONGEST = 8


@dataclass(frozen=True)
class Piece:
    """One token, or several that make a character only together. `target`: the model is trained to say it; `weight`:
    what it weighs, where that is told. `outside`: it has no place in the row, but is its last place's label."""

    ids: list[int]
    text: str
    position: int
    target: bool
    weight: float | None = None
    outside: bool = False


@dataclass(frozen=True)
class ShownDocument:
    """What attends to itself alone. `facts`: its unit, side and value, where they are told."""

    number: int
    first_place: int
    pieces: list[Piece]
    facts: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces if not piece.outside)

    @property
    def num_targets(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces if piece.target)


@dataclass(frozen=True)
class ShownRow:
    """`number`: in the order in which the run trains on rows. `places`: how many of them are padding."""

    number: int
    documents: list[ShownDocument]
    padding: int
    num_targets: int


def shown_rows(rows: Rows, numbers: np.ndarray, tokenizer: Tokenizer) -> list[ShownRow]:
    """These rows; their columns weight, unit, side and value are told where they are there."""
    return [_row(rows, index, int(number), tokenizer) for index, number in enumerate(numbers)]


def _row(rows: Rows, index: int, number: int, tokenizer: Tokenizer) -> ShownRow:
    documents = rows.documents_BT[index]
    starts = np.flatnonzero(np.diff(documents, prepend=-2))
    stops = [*starts[1:].tolist(), len(documents)]
    shown = [
        _document(rows, index, int(documents[start]), slice(start, stop), tokenizer)
        for start, stop in zip(starts.tolist(), stops)
        if documents[start] >= 0
    ]
    targets = int((rows.labels_BT[index] != IGNORE).sum())
    return ShownRow(number, shown, int((documents < 0).sum()), targets)


def _document(rows: Rows, index: int, number: int, places: slice, tokenizer: Tokenizer) -> ShownDocument:
    ids, labels = rows.tokens_BT[index, places].tolist(), rows.labels_BT[index, places].tolist()
    positions = rows.positions_BT[index, places].tolist()
    weights = rows.columns["weight"][index, places].tolist() if "weight" in rows.columns else None
    # The label of a place is the token at the next one, so a token is a target where the place before has a label.
    is_target = [False, *(label != IGNORE for label in labels)]
    weight_of = [None, *weights] if weights is not None else [None] * len(is_target)
    ids, positions = [*ids, labels[-1]], [*positions, positions[-1] + 1]
    count = len(ids) if is_target[-1] else len(ids) - 1
    pieces = []
    for start, stop in _whole_characters(ids[:count], is_target, tokenizer):
        text = _spelt(ids, start, stop, tokenizer)
        weight = weight_of[start] if is_target[start] else None
        outside = start >= len(labels)
        pieces.append(Piece(ids[start:stop], text, positions[start], is_target[start], weight, outside))
    facts = {
        name: float(rows.columns[name][index, places.start])
        for name in ("unit", "side", "value")
        if name in rows.columns and np.isfinite(rows.columns[name][index, places.start])
    }
    return ShownDocument(number, places.start, pieces, facts)


def _whole_characters(ids: list[int], is_target: list[bool], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Runs of tokens, most of one, that are spelt without half a character, and are targets alike."""
    found, start = [], 0
    for stop in range(1, len(ids) + 1):
        half = _spelt(ids, start, stop, tokenizer).endswith("\ufffd")
        alike = stop < len(ids) - 1 and is_target[stop] == is_target[start]
        if half and alike and stop - start < _LONGEST:
            continue
        found.append((start, stop))
        start = stop
    return found


def _spelt(ids: list[int], start: int, stop: int, tokenizer: Tokenizer) -> str:
    """Tokens [start, stop) as they are spelt behind those before them."""
    before = max(0, start - _CONTEXT)
    return tokenizer.decode(ids[before:stop])[len(tokenizer.decode(ids[before:start])) :]
