"""What moving a batch keeps, and what it makes known."""

import torch

from truestep.numerics.batch import Batch


def batch(documents: list[list[int]]) -> Batch:
    documents_BT = torch.tensor(documents, dtype=torch.int32)
    tokens_BT = torch.arange(documents_BT.numel()).view(documents_BT.shape)
    return Batch(tokens_BT, tokens_BT + 1, tokens_BT * 2, documents_BT)


def test_rows_of_one_document_are_known_as_such_on_any_device():
    before = batch([[4, 4, 4], [0, 0, 0]])
    for device in ("cpu", "meta"):
        assert before.to(device).documents_BT is None


def test_rows_with_borders_or_padding_stay_as_they_are():
    for documents in ([[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [-1, -1, -1]], [[0, 0, -1], [0, 0, 0]]):
        moved = batch(documents).to("cpu")
        assert moved.documents_BT is not None and moved.documents_BT.tolist() == documents
        assert batch(documents).to("meta").documents_BT is not None
