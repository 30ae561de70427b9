"""Held-out figures: the same for every batch size and world; the model and the random streams stay as they were."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests import tiny
from tests.data.fakes import make_store
from tests.dist import run_ranks
from truestep.data.loader import Corpus, evaluation_batches
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import Logits
from truestep.parallel.groups import Groups
from truestep.parallel.model import Parallel
from truestep.recipe.degrees import Degrees
from truestep.train.evaluate import Text, as_it_was, evaluate


class Uniform(nn.Module):
    """Gives every id of V the same chance, but for `bumps`: nats to add to a row's loss by its first token."""

    def __init__(self, vocab: int, losses: list[float] | None = None):
        super().__init__()
        self.vocab, self.losses = vocab, losses
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, tokens_BT, positions_BT=None, documents_BT=None, head=None, labels_BT=None):
        logits = torch.zeros(*tokens_BT.shape, self.vocab)
        if self.losses is not None:
            # a label with probability p has loss -ln p; the rest shares 1 - p
            for row, token in enumerate(tokens_BT[:, 0].tolist()):
                p = math.exp(-self.losses[token])
                logits[row] = math.log((1 - p) / (self.vocab - 1)) if p < 1 else -40.0
                logits[row, :, 0] = math.log(p)
        return head(Logits(logits))


def parallel_of(model: nn.Module) -> Parallel:
    return Parallel([model], model, Groups(Degrees()), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_c13_nine_losses_have_the_mean_four_for_every_batch_size(size):
    tokens = torch.arange(9)[:, None]
    whole = Batch(tokens, torch.zeros_like(tokens), torch.zeros_like(tokens), None)
    pieces = [
        Batch(t, y, p, None)
        for t, y, p in zip(whole.tokens_BT.split(size), whole.labels_BT.split(size), whole.positions_BT.split(size))
    ]
    model = Uniform(50, losses=[float(i) for i in range(9)])
    figures = evaluate(parallel_of(model), tiny.job(), pieces, None)
    assert figures.loss == pytest.approx(4.0, rel=1e-5) and figures.targets == 9


def test_c80_bytes_of_tokens_and_specials_left_out_of_both_sums():
    """Four single-byte tokens of one emoji at 1 nat each, and a special token whose loss would be 5."""
    labels = torch.tensor([[1, 2, 3, 4, 0]])
    model = nn.Module()
    nll = {0: 5.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}

    class Fixed(nn.Module):
        def forward(self, tokens_BT, positions_BT=None, documents_BT=None, head=None, labels_BT=None):
            logits = torch.full((1, 5, 200), 0.0, dtype=torch.float64)
            for place, label in enumerate(labels[0].tolist()):
                p = math.exp(-nll[label])
                logits[0, place] = math.log((1 - p) / 199)
                logits[0, place, label] = math.log(p)
            return head(Logits(logits))

    model = Fixed()
    lengths = torch.zeros(200, dtype=torch.int64)
    lengths[1:5] = 1
    batch = Batch(torch.zeros_like(labels), labels, torch.zeros_like(labels), None)
    text = Text(lengths, num_bytes=4, num_documents=0, complete=True)
    figures = evaluate(parallel_of(model), tiny.job(), [batch], text)
    assert figures.bits_per_byte == pytest.approx(1.442695, rel=1e-6)
    assert figures.loss == pytest.approx(9 / 5, rel=1e-9)


def test_first_tokens_of_documents_are_charged_in_full(tmp_path):
    """A uniform model codes every token with log2 V bits, so the whole text must cost tokens x log2 V."""
    documents = [np.arange(1, n + 1) % 40 + 1 for n in (5, 17, 3)]
    store = make_store(tmp_path / "store", documents, vocab_size=64)
    batches = evaluation_batches(Corpus(store), 8, True, 0, 1, 2)
    lengths = torch.ones(64, dtype=torch.int64)
    lengths[store.eod_id] = 0
    text = Text(lengths, num_bytes=25, num_documents=3, complete=True)
    figures = evaluate(parallel_of(Uniform(64)), tiny.job(), batches, text)
    assert figures.bits_per_byte == pytest.approx(25 * math.log2(64) / 25, rel=1e-6)


def _figures(rank, world, folder):
    from truestep.data.store import TokenStore

    training = tiny.state(tiny.job(rank, world))
    store = TokenStore.open(folder)
    batches = evaluation_batches(Corpus(store), tiny.CONTEXT, True, rank, world, 2)
    found = evaluate(training.parallel, training.job, batches, None)
    return found.loss, found.targets


def test_every_world_size_has_the_same_figures(tmp_path):
    random = np.random.default_rng(0)
    documents = [random.integers(1, tiny.VOCAB, size=n) for n in (40, 7, 90, 33)]
    make_store(tmp_path / "store", documents, vocab_size=tiny.VOCAB)
    alone = _figures(0, 1, tmp_path / "store")
    for world in (2, 3):
        for found in run_ranks(_figures, world, tmp_path / "store"):
            assert found[1] == alone[1] and found[0] == pytest.approx(alone[0], rel=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_mode_and_random_streams_come_back_also_after_an_error(fails):
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    model.train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    try:
        with as_it_was([model]):
            model.eval()
            torch.rand(100)
            if fails:
                raise RuntimeError("inside")
    except RuntimeError:
        assert fails
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.rand(3), expected)


def test_ignored_places_count_nothing():
    training = tiny.state(tiny.job())
    batch = tiny.rows()[0]
    figures = evaluate(training.parallel, training.job, [batch, tiny.padding(batch)], None)
    assert figures.targets == int((batch.labels_BT != IGNORE).sum())
