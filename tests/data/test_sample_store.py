"""Stores of samples: what goes in comes out, verified; merged stores equal those written at once."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sample_fakes import EOD, VOCAB, counted, make_samples, sample, units
from truestep.data.sample_store import SampleStore, SampleWriter, open_store
from truestep.data.samples import Sample, Unit
from truestep.data.store import StoreWriter, TokenStore
from truestep.errors import DataError


def same(ours: list[list[Unit]], theirs: list[list[Unit]]) -> bool:
    def plain(one: Sample) -> tuple:
        return one.ids.tolist(), one.roles.tolist(), one.side, np.asarray(one.value, np.float32).tolist()

    def all_plain(documents: list[list[Unit]]) -> list:
        return [[[plain(s) for s in unit] for unit in document] for document in documents]

    return all_plain(ours) == all_plain(theirs)


def every(store: SampleStore) -> list[list[Unit]]:
    return [store.document(number) for number in range(store.num_documents)]


@settings(deadline=None, max_examples=40)
@given(units(2), st.integers(0, 12))
def test_what_goes_in_comes_out_whether_at_once_or_merged(
    tmp_path_factory: pytest.TempPathFactory, quick_disk: None, made: list, cut: int
):
    folder, documents = tmp_path_factory.mktemp("samples"), counted(made)
    documents = [[unit for document in documents[:cut] for unit in document], *documents[cut:]]  # one row of many units
    documents = [document for document in documents if document]
    whole = make_samples(folder / "whole", documents)
    assert same(every(whole), documents)
    assert whole.num_units == len(made) and whole.num_samples == 2 * len(made)
    parts = [make_samples(folder / f"part{n}", documents[n::2]) for n in range(2) if documents[n::2]]
    with SampleWriter(folder / "merged", VOCAB, EOD, block_bytes=64) as writer:
        for part in parts:
            writer.append_store(part)
        merged = writer.finish({})
    assert same(every(merged), [*documents[::2], *documents[1::2]])
    merged.verify()
    assert len(parts) > 1 or merged.fingerprint == whole.fingerprint


def test_values_may_be_told_by_token(tmp_path: Path):
    steps = np.array([np.nan, 0.0, np.nan, 1.0], np.float32)
    documents = [[[sample([0, 2, 2, 2], value=steps)]], [[sample([0, 2], value=np.array([np.nan, 1.0], np.float32))]]]
    store = make_samples(tmp_path / "s", documents, by_token=True)
    np.testing.assert_array_equal(store.token_values(np.array([1, 4]), np.array([3, 2])), [0, np.nan, 1, np.nan, 1])
    with SampleWriter(tmp_path / "m", VOCAB, EOD, by_token=True) as writer:
        writer.append_store(store)
        np.testing.assert_array_equal(writer.finish({}).document(0)[0][0].value, steps)


def test_a_changed_byte_of_any_file_is_found(tmp_path: Path):
    store = make_samples(tmp_path / "s", counted([[[0, 2, 2]], [[0, 1, 2]]]))
    for file in sorted(store.path.glob("*.bin")):
        before = file.read_bytes()
        file.write_bytes(bytes([before[0] ^ 1]) + before[1:])
        with pytest.raises(DataError, match=file.name):
            SampleStore.open(store.path).verify()
        file.write_bytes(before)
    SampleStore.open(store.path).verify()


def test_a_folder_is_opened_as_what_it_is(tmp_path: Path):
    make_samples(tmp_path / "s", counted([[[0, 2]]]))
    with StoreWriter(tmp_path / "t", VOCAB, EOD) as writer:
        writer.append(np.array([1, 2]), 2)
        writer.finish({})
    assert isinstance(open_store(tmp_path / "s"), SampleStore) and isinstance(open_store(tmp_path / "t"), TokenStore)
    with pytest.raises(DataError, match="is not the header of a truestep tokens 1"):
        TokenStore.open(tmp_path / "s")
    with pytest.raises(DataError, match="build the data first"):
        open_store(tmp_path / "nothing")


@pytest.mark.parametrize(
    "bad, says",
    [
        ([[sample([0, 2], first=VOCAB - 1)]], f"id {VOCAB} of a sample is outside a vocabulary of {VOCAB}"),
        ([[Sample(np.array([1, 2]), np.array([2], np.uint8))]], "one role for each"),
        ([[Sample(np.array([1.5]), np.array([2], np.uint8))]], "give 1-D integers"),
        ([[Sample(np.empty(0, np.int64), np.empty(0, np.uint8))]], "give 1-D integers"),
        ([[sample([2, 2], value=np.zeros(2, np.float32))]], "give one number"),
        ([[]], "has no sample"),
        ([], "has no sample"),
    ],
)
def test_what_is_no_sample_is_refused_and_leaves_nothing(tmp_path: Path, bad: list[Unit], says: str):
    with pytest.raises(DataError, match=says), SampleWriter(tmp_path / "s", VOCAB, EOD) as writer:
        writer.append(bad, 1)
    assert not (tmp_path / "s").exists()


def test_a_store_of_another_vocabulary_is_not_merged(tmp_path: Path):
    other = make_samples(tmp_path / "other", counted([[[0, 2]]]), vocab_size=99)
    with pytest.raises(DataError, match="same tokenizer"), SampleWriter(tmp_path / "s", VOCAB, EOD) as writer:
        writer.append_store(other)
