"""Losses are found by name or by the user's import path; what would not be used is refused in one sentence."""

import pytest
import torch

from tests.losses.test_cross_entropy import batch
from truestep.errors import UserError
from truestep.losses.base import LossSum, open_loss
from truestep.losses.cross_entropy import CrossEntropy
from truestep.numerics.batch import IGNORE
from truestep.numerics.head import HeadInput
from truestep.recipe.stage import Loss as LossSection
from truestep.recipe.stage import Stage


def stage(loss):
    return Stage(name="base", data="text", context=8, tokens=8, batch_tokens=8, loss=loss)


OWN = """
from truestep.losses.base import LossSum
from truestep.numerics.batch import IGNORE

class Squares:
    def __init__(self, power=2):
        self.power = power

    def weight(self, batch):
        return batch.num_targets

    def __call__(self, out, batch):
        right = out.logits().gather(-1, batch.labels_BT.clamp(min=0)[..., None])[..., 0]
        return LossSum(((1 - right) ** self.power)[batch.labels_BT != IGNORE].sum())

class NoWeight:
    def __call__(self, out, batch):
        return None
"""


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    (tmp_path / "my_own_losses.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_by_name():
    assert open_loss(stage(LossSection(z_loss=1e-4)), 256) == CrossEntropy(z_loss=1e-4, chunk_tokens=256)


def test_own_loss_from_outside_the_package(own_package):
    loss = open_loss(stage(LossSection(kind="my_own_losses:Squares", options={"power": 4})), 256)
    b = batch(torch.tensor([[0, 1, IGNORE]]))
    result = loss(HeadInput(torch.ones(1, 3, 1), torch.tensor([[3.0], [1.0]])), b)
    assert loss.weight(b) == 2 and result.sum.item() == 16.0 and result.metrics == {}


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones((), dtype=torch.bfloat16)])
def test_a_sum_is_one_number_in_fp32_at_least(wrong):
    with pytest.raises(UserError, match="one float32 or float64 number"):
        LossSum(wrong)


@pytest.mark.parametrize(
    "section, says",
    [
        (LossSection(kind="crossentropy"), "loss.kind 'crossentropy' is unknown"),
        (LossSection(options={"label_smoothing": 0.1}), "label_smoothing"),
        (LossSection(kind="my_own_losses:Missing"), "has no 'Missing'"),
        (LossSection(kind="no_such_package:Loss"), "there is no module 'no_such_package'"),
        (LossSection(kind="my_own_losses:Squares", options={"colour": 1}), "colour"),
        (LossSection(kind="my_own_losses:Squares", z_loss=0.1), "would not be used"),
        (LossSection(kind="my_own_losses:NoWeight"), "lacks weight(batch)"),
    ],
)
def test_wrong_sections_are_one_sentence(own_package, section, says):
    with pytest.raises(UserError) as error:
        open_loss(stage(section), 256)
    assert says in str(error.value) and "\n" not in str(error.value)
