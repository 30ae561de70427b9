"""Packing of samples: every unit is in one row, or counted; labels, positions, documents and columns are what a naive
loop makes."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sample_fakes import counted, make_samples, sample, units
from truestep.data.packing import IGNORE, Rows
from truestep.data.sample_packing import TARGETS, LossOn, SamplePacking, Supervision, fair_share
from truestep.data.samples import Sample, Unit
from truestep.data.store import TokenStore
from truestep.errors import DataError

loss_on = st.sampled_from(list(TARGETS))


def all_rows(packing: SamplePacking) -> Rows:
    return packing.rows(np.arange(packing.num_rows))


def samples_of(rows: Rows) -> list[tuple[int, int, list[int]]]:
    """(row, first place, places) of every document of the rows."""
    found = []
    for row, documents in enumerate(rows.documents_BT):
        for number in np.unique(documents[documents >= 0]):
            places = np.flatnonzero(documents == number).tolist()
            assert places == list(range(places[0], places[-1] + 1))
            found.append((row, places[0], places))
    return found


def naive_labels(one: Sample, length: int, on: LossOn) -> list[int]:
    """Label of each of the first `length` places of a sample."""
    wanted = {"assistant": one.roles > 0, "last": one.roles == 2, "all": one.roles >= 0}[on]
    return [int(one.ids[t + 1]) if t + 1 < length and wanted[t + 1] else IGNORE for t in range(length)]


def cut_lengths(unit: Unit, context: int) -> list[int]:
    """The longest common limit of the samples that lets the unit fit."""
    lengths = [len(one.ids) for one in unit]
    limit = max(n for n in range(max(lengths) + 1) if sum(min(n, length) for length in lengths) <= context)
    return [min(limit, length) for length in lengths]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 2).flatmap(units), st.integers(2, 20), loss_on, st.sampled_from(["truncate", "drop"]))
def test_every_unit_is_whole_in_one_row_or_counted(
    tmp_path_factory: pytest.TempPathFactory, quick_disk: None, made: list, context: int, on: LossOn, too_long: str
):
    documents = counted(made)
    store = make_samples(tmp_path_factory.mktemp("rows") / "s", documents)
    kept: dict[int, tuple[Sample, int, Unit, list[int]]] = {}
    counts: Counter[str] = Counter()
    for (unit,) in documents:
        long = sum(len(one.ids) for one in unit) > context
        lengths = cut_lengths(unit, context)
        bare = any(set(naive_labels(one, n, on)) <= {IGNORE} for one, n in zip(unit, lengths))
        if long and too_long == "drop":
            counts["dropped_too_long"] += 1
        elif bare:
            counts["dropped_truncated_to_no_target" if long else "dropped_without_target"] += 1
        else:
            counts["truncated"] += long
            kept |= {int(one.ids[0]): (one, n, unit, lengths) for one, n in zip(unit, lengths)}
    if not kept:
        with pytest.raises(DataError, match="no unit of"):
            SamplePacking(store, context, too_long, Supervision(on))
        return
    packing = SamplePacking(store, context, too_long, Supervision(on, by_sample=True))
    rows = all_rows(packing)
    seen = {}
    for row, first, places in samples_of(rows):
        one, length, unit, lengths = kept[int(rows.tokens_BT[row, first])]
        labels = naive_labels(one, length, on)
        here = slice(first, first + length)
        assert len(places) == length and rows.tokens_BT[row, here].tolist() == one.ids[:length].tolist()
        assert rows.positions_BT[row, here].tolist() == list(range(length))
        assert rows.labels_BT[row, here].tolist() == labels
        opens = one is unit[0]
        assert rows.columns["counted"][row, here].tolist() == [float(opens)] + [0.0] * (length - 1)
        assert set(rows.columns["side"][row, here].tolist()) == {one.side}
        assert set(rows.columns["value"][row, here].tolist()) == {one.value}
        share = np.float32(1 / sum(label != IGNORE for label in labels))
        assert rows.columns["weight"][row, here].tolist() == [0.0 if y == IGNORE else share for y in labels]
        (number,) = set(rows.columns["unit"][row, here].tolist())
        seen[int(one.ids[0])] = (row, number)
    assert seen.keys() == kept.keys()
    for row in range(packing.num_rows):
        numbers = {number for at, number in seen.values() if at == row}
        assert numbers == set(range(len(numbers)))
    for (unit,) in documents:
        assert len({seen[int(one.ids[0])] for one in unit if int(one.ids[0]) in seen}) <= 1
    assert len(set(seen.values())) == len({id(unit) for _, _, unit, _ in kept.values()})
    padding = rows.documents_BT < 0
    assert (
        all(not column[padding].any() for column in rows.columns.values()) and (rows.labels_BT[padding] == IGNORE).all()
    )
    for row in range(packing.num_rows):
        assert packing.targets(np.array([row])) == (rows.labels_BT[row] != IGNORE).sum()
    report = packing.report
    assert {name: report[name] for name in counts} == counts
    assert report["tokens_in"] == store.num_tokens == report["tokens_out"] + report["dropped_tokens"]
    assert report["tokens_out"] == (~padding).sum() and report["padding_tokens"] == padding.sum()
    assert report["targets"] == packing.targets(np.arange(packing.num_rows)) == (rows.labels_BT != IGNORE).sum()
    assert rows.columns["counted"].sum() == report["units"] - sum(
        report[name] for name in report if name.startswith("dropped_") and name != "dropped_tokens"
    )


def test_targets_are_counted_without_reading_tokens_or_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = make_samples(tmp_path / "s", counted([[[0, 1, 2]], [[0, 2]], [[2, 2, 2, 2]]]))
    packing = SamplePacking(store, 4, "truncate", Supervision())
    monkeypatch.setattr(TokenStore, "read", None)
    monkeypatch.setattr(type(store), "roles", None)
    again = SamplePacking(store, 4, "truncate", Supervision())  # its index is there
    assert packing.targets(np.arange(packing.num_rows)) == again.targets(np.arange(again.num_rows)) == 6


def test_the_first_token_is_no_target_and_the_last_one_is(tmp_path: Path):
    store = make_samples(tmp_path / "s", [[[sample([2, 2, 2], first=5)]]])
    rows = all_rows(SamplePacking(store, 4, "truncate", Supervision()))
    assert rows.labels_BT.tolist() == [[6, 7, IGNORE, IGNORE]] and rows.tokens_BT.tolist() == [[5, 6, 7, 0]]


@pytest.mark.parametrize("on, labels", [("assistant", [2, IGNORE, 4, 5]), ("last", [IGNORE, IGNORE, 4, 5])])
def test_loss_on_turns(tmp_path: Path, on: LossOn, labels: list[int]):
    store = make_samples(tmp_path / "s", [[[sample([0, 1, 0, 2, 2])]]])
    assert all_rows(SamplePacking(store, 5, "truncate", Supervision(on))).labels_BT[0, :4].tolist() == labels


def test_loss_on_all_is_all_but_the_first(tmp_path: Path):
    store = make_samples(tmp_path / "s", [[[sample([0, 1, 0, 2])]]])
    assert all_rows(SamplePacking(store, 4, "truncate", Supervision("all"))).labels_BT.tolist() == [[2, 3, 4, IGNORE]]


def test_a_sample_that_is_too_long_is_refused_by_its_row(tmp_path: Path):
    store = make_samples(tmp_path / "s", counted([[[0, 2]], [[0, 0, 2, 2, 2]], [[2] * 9]]))
    with pytest.raises(DataError, match=r"row 1 has 5 tokens, more than 4 \(2 such rows\)"):
        SamplePacking(store, 4, "refuse", Supervision())
    with pytest.raises(DataError, match="would tear these rows apart"):
        SamplePacking(store, 4, "split", Supervision())


def test_columns_are_those_that_are_asked_for(tmp_path: Path):
    store = make_samples(tmp_path / "s", counted([[[0, 2]]]))
    asked = {
        Supervision(units=False): [],
        Supervision(): ["counted", "side", "unit", "value"],
        Supervision(by_sample=True, units=False): ["counted", "weight"],
    }
    for use, names in asked.items():
        packing = SamplePacking(store, 4, "truncate", use)
        rows = all_rows(packing)
        assert sorted(packing.columns) == sorted(rows.columns) == names
        assert all(rows.columns[n].dtype == column.dtype for n, column in packing.columns.items())


def test_labels_of_steps_lie_at_their_own_places(tmp_path: Path):
    steps = [np.array(values, np.float32) for values in ([np.nan, 0.5, np.nan, 1.0], [np.nan, 0.25])]
    documents = [[[sample([0, 2, 2, 2], value=steps[0])]], [[sample([0, 2], first=9, value=steps[1])]]]
    store = make_samples(tmp_path / "s", documents, by_token=True)
    found = all_rows(SamplePacking(store, 8, "truncate", Supervision("last"))).columns["value"]
    np.testing.assert_array_equal(found, [[np.nan, 0.5, np.nan, 1.0, np.nan, 0.25, 0, 0]])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(5, 30))
def test_a_fair_share_is_the_largest_limit_that_fits(lengths: list[int], total: int):
    share = fair_share(np.array(lengths), total)
    assert sum(min(length, share) for length in lengths) <= total
    assert sum(lengths) <= total or sum(min(length, share + 1) for length in lengths) > total


def test_the_same_rows_come_from_any_store_of_the_same_content(tmp_path: Path):
    documents = counted([[[0, 2, 2]], [[0, 1, 2]], [[0, 0, 2]], [[0, 2]]])
    one, other = (
        all_rows(SamplePacking(make_samples(tmp_path / n, documents), 6, "drop", Supervision())) for n in "ab"
    )
    for name in ("tokens_BT", "labels_BT", "positions_BT", "documents_BT"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
