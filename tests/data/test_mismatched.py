"""KTO's pairs of a prompt and the answer of another row: which they are, where they lie, that nothing else decides."""

import numpy as np
import pytest
import torch

from truestep.data.loader import Corpus
from truestep.data.mismatched import mismatched_rows
from truestep.data.sample_store import SampleStore, SampleWriter
from truestep.data.samples import LAST, NO_LOSS, Sample
from truestep.errors import DataError
from truestep.numerics.batch import IGNORE


def corpus(folder, lengths) -> Corpus:
    """Row i: a prompt of ids 10 i + 1, ... and an answer of ids 10 i + 6, ..., of these lengths."""
    with SampleWriter(folder / "store", 200, 0) as writer:
        for row, (prompt, answer) in enumerate(lengths):
            ids = np.concatenate([10 * row + 1 + np.arange(prompt), 10 * row + 6 + np.arange(answer)])
            roles = np.repeat(np.array([NO_LOSS, LAST], np.uint8), [prompt, answer])
            writer.append([[Sample(ids, roles, side=1 if row % 2 else -1)]], 1)
        return Corpus(writer.finish({}))


def documents(batches):
    """(ids, labels, positions) of each document, in order."""
    found = []
    for batch in batches:
        for row in range(len(batch.tokens_BT)):
            for number in range(int(batch.documents_BT[row].max()) + 1):
                at = batch.documents_BT[row] == number
                one = (batch.tokens_BT[row, at], batch.labels_BT[row, at], batch.positions_BT[row, at])
                found.append(tuple(x.tolist() for x in one))
    return found


def test_a_prompt_gets_the_answer_of_the_next_row(tmp_path):
    batches, count = mismatched_rows(corpus(tmp_path, [(2, 2), (3, 1), (1, 3)]), 8, 64, 1, 1)
    none = IGNORE
    assert count == 3 and documents(batches) == [
        ([1, 2, 16], [none, 16, none], [0, 1, 2]),
        ([11, 12, 13, 26, 27, 28], [none, none, 26, 27, 28, none], [0, 1, 2, 3, 4, 5]),
        ([21, 6, 7], [6, 7, none], [0, 1, 2]),
    ]
    assert all(batch.tokens_BT.shape == (1, 8) for batch in batches)


def test_ranks_and_rows_of_a_microbatch_change_no_pair(tmp_path):
    found = corpus(tmp_path, [(2, 2), (3, 1), (1, 3), (4, 2), (2, 1)])
    wanted = documents(mismatched_rows(found, 12, 4, 1, 1)[0])
    assert len(wanted) == 4
    for rows, ranks in ((2, 1), (1, 3), (4, 2)):
        batches, count = mismatched_rows(found, 12, 4, rows, ranks)
        assert len(batches) % ranks == 0 and count == 4 and documents(batches) == wanted
        assert all(batch.tokens_BT.shape == (rows, 12) for batch in batches)


def test_what_is_too_long_is_cut_and_what_leaves_no_room_is_left_out(tmp_path):
    batches, count = mismatched_rows(corpus(tmp_path, [(2, 5), (5, 4), (4, 5)]), 5, 64, 1, 1)
    assert count == 2 and [ids for ids, *_ in documents(batches)] == [[1, 2, 16, 17, 18], [21, 22, 23, 24, 6]]
    assert torch.cat([batch.labels_BT for batch in batches]).ne(IGNORE).sum() == 4


@pytest.mark.parametrize(("lengths", "words"), [([(2, 2)], "one row only"), ([(5, 1), (5, 1)], "raise context")])
def test_no_pair_is_one_sentence(tmp_path, lengths, words):
    with pytest.raises(DataError, match=words):
        mismatched_rows(corpus(tmp_path, lengths), 5, 64, 1, 1)


def test_pairs_are_spread_evenly(tmp_path):
    found: Corpus = corpus(tmp_path, [(1, 1)] * 10)
    assert isinstance(found.store, SampleStore)
    ids = [ids[0] for ids, *_ in documents(mismatched_rows(found, 8, 5, 1, 1)[0])]
    assert ids == [1, 21, 41, 61, 81]
