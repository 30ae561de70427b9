"""Stored columns: what was written for a token is at the place that holds it, in rows of any packing."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.fakes import make_store
from tests.data.sample_fakes import counted, make_samples, units
from truestep.data.columns import ColumnStore, ColumnWriter, column_key
from truestep.data.loader import Corpus, Loader, evaluation_batches
from truestep.data.packing import Column, Packing
from truestep.data.sample_packing import Supervision
from truestep.errors import DataError

F32 = np.dtype("float32")


def of_tokens(packing: Packing, context: int, path: Path, num_tokens: int) -> ColumnStore:
    """A column that holds each token's id + 1/2, written from rows in an order of its own."""
    with ColumnWriter(path, "half", column_key(of="ids"), num_tokens, Column(F32)) as writer:
        for row in reversed(range(packing.num_rows)):
            at = np.array([row])
            pieces, rows = packing.pieces(at), packing.rows(at)
            writer.write(pieces.starts, pieces.lengths, rows.tokens_BT.flat[pieces.places(context)] + F32.type(0.5))
        return writer.finish({"made": "here"})


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=12), st.integers(2, 9), st.sampled_from(["split", "best-fit"]))
def test_a_column_of_text_lies_at_its_tokens(
    tmp_path_factory: pytest.TempPathFactory, quick_disk: None, lengths: list[int], context: int, packing: str
):
    folder, numbers = tmp_path_factory.mktemp("columns"), iter(range(1, 999))
    store = make_store(folder / "s", [[next(numbers) for _ in range(length)] for length in lengths])
    for too_long in ("truncate", "split"):
        corpus = Corpus(store, packing=packing, too_long=too_long)
        check(corpus, context, folder / f"{too_long}.column")


@settings(deadline=None, max_examples=40)
@given(units(2), st.integers(6, 20))
def test_a_column_of_samples_lies_at_their_tokens(
    tmp_path_factory: pytest.TempPathFactory, quick_disk: None, made: list, context: int
):
    folder = tmp_path_factory.mktemp("columns")
    store = make_samples(folder / "s", counted([*made, [[0, 2], [0, 2]]]))
    check(Corpus(store, supervision=Supervision("all")), context, folder / "column")


def check(corpus: Corpus, context: int, path: Path) -> None:
    packing = corpus.open(context, True)
    column = of_tokens(packing, context, path, corpus.store.num_tokens)
    column.verify()
    both = Corpus(corpus.store, 1.0, None, corpus.packing, corpus.too_long, None, corpus.supervision, (column,))
    rows = both.open(context, True).rows(np.arange(packing.num_rows))
    real = rows.documents_BT >= 0
    assert rows.columns["half"].dtype == F32 and (rows.columns["half"][~real] == 0).all()
    np.testing.assert_array_equal(rows.columns["half"][real], rows.tokens_BT[real] + 0.5)
    assert both.describe() == corpus.describe() | {"columns": {"half": column.key}}


def test_a_column_may_have_many_values_a_token_and_goes_through_the_loader(tmp_path: Path):
    store = make_samples(tmp_path / "s", counted([[[0, 2, 2]], [[0, 2]], [[0, 0, 2]]]))
    values = np.arange(8 * 3, dtype=np.int32).reshape(8, 3)
    with ColumnWriter(tmp_path / "c", "teacher_ids", "k", 8, Column(np.dtype("int32"), (3,))) as writer:
        writer.write(np.array([3, 0]), np.array([5, 3]), np.concatenate([values[3:], values[:3]]))
        column = writer.finish()
    corpus = Corpus(store, supervision=Supervision(units=False), columns=(column,))
    loader = Loader([corpus], 4, seed=1)
    batch = loader.rows(np.arange(3))
    real = batch.documents_BT.numpy() >= 0
    assert batch.columns["teacher_ids"].shape == (3, 4, 3)
    np.testing.assert_array_equal(batch.columns["teacher_ids"].numpy()[real], values[batch.tokens_BT.numpy()[real] - 1])
    assert loader.padding(2).columns["teacher_ids"].shape == (2, 4, 3)
    (last,) = list(evaluation_batches(corpus, 4, True, 0, 1, 4))
    assert last.columns["teacher_ids"].shape == (4, 4, 3) and not last.columns["teacher_ids"][3].any()
    assert Loader([Corpus(store, supervision=Supervision(units=False))], 4, seed=1).fingerprint != loader.fingerprint


def test_a_value_that_is_no_number_is_refused_by_its_token(tmp_path: Path):
    wrong = np.array([0, 1, 2, np.nan], F32)
    says = pytest.raises(DataError, match="column 'reference' is not finite at token 6; check the model")
    with says, ColumnWriter(tmp_path / "c", "reference", "k", 9, Column(F32)) as writer:
        writer.write(np.array([1, 5]), np.array([2, 2]), wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_column_of_another_key_or_with_a_changed_byte_is_refused(tmp_path: Path):
    with ColumnWriter(tmp_path / "c", "reference", column_key(model="a"), 9, Column(F32)) as writer:
        writer.write(np.array([0]), np.array([9]), np.ones(9, F32))
        writer.finish()
    assert ColumnStore.open(tmp_path / "c", column_key(model="a")).name == "reference"
    with pytest.raises(DataError, match="with another model, other data or other settings"):
        ColumnStore.open(tmp_path / "c", column_key(model="b"))
    data = (tmp_path / "c" / "values.bin").read_bytes()
    (tmp_path / "c" / "values.bin").write_bytes(data[:-1] + b"\1")
    with pytest.raises(DataError, match="does not match its checksum"):
        ColumnStore.open(tmp_path / "c").read(np.array([8]), np.array([1]))


def test_corpora_with_other_columns_are_not_mixed(tmp_path: Path):
    store = make_samples(tmp_path / "s", counted([[[0, 2, 2]]]))
    text = make_store(tmp_path / "t", [[1, 2, 3]])
    with pytest.raises(DataError, match="mix data of one format only"):
        Loader([Corpus(store), Corpus(text)], 4, seed=1)
    Loader([Corpus(store, supervision=Supervision(units=False)), Corpus(text)], 4, seed=1)
