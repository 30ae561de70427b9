"""What moving a batch keeps, and what it makes known."""

import torch

from truestep.models.attention import one_document
from truestep.numerics.batch import Batch


def batch(documents: list[list[int]]) -> Batch:
    documents_BT = torch.tensor(documents, dtype=torch.int32)
    tokens_BT = torch.arange(documents_BT.numel()).view(documents_BT.shape)
    return Batch(tokens_BT, tokens_BT + 1, tokens_BT * 2, documents_BT)


def test_rows_of_one_document_are_known_as_such_on_any_device():
    before = batch([[4, 4, 4], [0, 0, 0]])
    after = before.to("cpu")
    assert after.documents_BT.stride(1) == 0 and one_document(after.documents_BT)
    assert torch.equal(after.documents_BT, before.documents_BT)
    on_meta = before.to("meta").documents_BT  # any device whose numbers the host cannot see
    assert on_meta.shape == (2, 3) and one_document(on_meta)


def test_rows_with_borders_or_padding_stay_as_they_are():
    for documents in ([[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [-1, -1, -1]], [[0, 0, -1], [0, 0, 0]]):
        after = batch(documents).to("cpu")
        assert after.documents_BT.tolist() == documents and not one_document(after.documents_BT)
        assert not one_document(batch(documents).to("meta").documents_BT)
