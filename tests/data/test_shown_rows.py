"""Rows as people see them: a token is marked where the loss has it as a label, and the text is all there."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.fakes import make_store
from tests.data.sample_fakes import make_samples
from truestep.data.packing import IGNORE, SplitPacking
from truestep.data.sample_packing import SamplePacking, Supervision
from truestep.data.samples import Sample
from truestep.data.shown_rows import ShownDocument, shown_rows
from truestep.data.tokenizer import bytes_tokenizer

BYTES = bytes_tokenizer()


def of_text(prompt: str, answer: str) -> Sample:
    ids = np.append(BYTES.encode(prompt + answer), BYTES.eod_id)
    roles = np.where(np.arange(len(ids)) < len(prompt.encode()), 0, 2)
    return Sample(ids, roles.astype(np.uint8))


def marked(document: ShownDocument) -> str:
    return "".join(f"[{piece.text}]" if piece.target else piece.text for piece in document.pieces)


def test_targets_are_the_tokens_that_are_labels(tmp_path: Path):
    store = make_samples(tmp_path / "s", [[[of_text("ab ", "ba")]], [[of_text("x", "y")]]], BYTES.vocab_size)
    packing = SamplePacking(store, 12, "truncate", Supervision(by_sample=True))
    (row,) = shown_rows(packing.rows(np.array([0])), np.array([7]), BYTES)
    assert (row.number, row.padding, row.num_targets) == (7, 3, 5)
    assert [marked(one) for one in row.documents] == ["ab [b][a][<|endoftext|>]", "x[y][<|endoftext|>]"]
    assert [one.first_place for one in row.documents] == [0, 6]
    assert [piece.position for piece in row.documents[1].pieces] == [0, 1, 2]
    assert [piece.weight for piece in row.documents[1].pieces] == [None, 0.5, 0.5]
    assert [one.facts for one in row.documents] == [
        {"unit": 0.0, "side": 0.0, "value": 0.0},
        {"unit": 1.0, "side": 0.0, "value": 0.0},
    ]


def test_a_wrong_mask_is_seen(tmp_path: Path):
    """The row that a mistake in the loss mask would make shows it: the header instead of the answer."""
    right = of_text("say: ", "yes")
    wrong = Sample(right.ids, (2 - right.roles).astype(np.uint8))
    store = make_samples(tmp_path / "s", [[[wrong]]], BYTES.vocab_size)
    rows = SamplePacking(store, 12, "truncate", Supervision()).rows(np.array([0]))
    ((document,),) = (row.documents for row in shown_rows(rows, np.array([0]), BYTES))
    assert marked(document) == "s[a][y][:][ ]yes<|endoftext|>"


@pytest.mark.parametrize("text", ["é", "日本", "a😀b", "Grüße"])
def test_characters_of_many_tokens_are_spelt_whole(tmp_path: Path, text: str):
    store = make_samples(tmp_path / "s", [[[of_text("? ", text)]]], BYTES.vocab_size)
    rows = SamplePacking(store, 24, "truncate", Supervision()).rows(np.array([0]))
    ((document,),) = (row.documents for row in shown_rows(rows, np.array([0]), BYTES))
    assert "".join(piece.text for piece in document.pieces) == f"? {text}<|endoftext|>"
    assert sum(len(piece.ids) for piece in document.pieces) == len(text.encode()) + 3 == document.num_tokens
    assert document.num_targets == len(text.encode()) + 1


def test_the_label_of_a_rows_last_place_is_shown_outside_of_it(tmp_path: Path):
    store = make_store(tmp_path / "s", [BYTES.encode("abcdefgh").tolist()], BYTES.vocab_size)
    rows = SplitPacking(store, 4, True).rows(np.array([0, 1]))
    first, second = shown_rows(rows, np.array([0, 1]), BYTES)
    assert marked(first.documents[0]) == "a[b][c][d][e]"
    assert [piece.outside for piece in first.documents[0].pieces] == [False] * 4 + [True]
    assert first.documents[0].num_tokens == 4 and first.num_targets == 4
    shown = sum(len(row.documents[0].pieces) for row in (first, second))
    assert shown - 2 == (rows.labels_BT != IGNORE).sum()  # all but the first of each row
