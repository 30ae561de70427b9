"""Sums divided by one global weight: splits, ranks and padding change nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist import run_ranks
from tests.losses.test_cross_entropy import batch, case, close, plain
from truestep.losses.base import LossSum
from truestep.losses.cross_entropy import CrossEntropy, linear_cross_entropy
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput


class Given:
    """A loss whose value at a target is the hidden state there: sums and gradients can be read off."""

    def weight(self, batch: Batch) -> int:
        return batch.num_targets

    def __call__(self, out: HeadInput, batch: Batch) -> LossSum:
        return LossSum(out.hidden_BTD[..., 0].masked_fill(batch.labels_BT == IGNORE, 0.0).sum())


def given(values: list[float], num_padding: int = 0):
    """One microbatch: hidden states, and a batch with a target at each but the padding's, whose value would be seen."""
    hidden_BTD = torch.tensor([*values, *[99.0] * num_padding], dtype=torch.float64)[None, :, None].requires_grad_()
    labels = torch.tensor([[0] * len(values) + [IGNORE] * num_padding])
    return hidden_BTD, batch(labels)


def global_mean(microbatches, loss=None):
    loss = loss or Given()
    weight = sum(loss.weight(b) for _, b in microbatches)
    total = sum(loss(HeadInput(h, h), b).sum for h, b in microbatches) / weight
    total.backward()
    return total.item()


def test_c12_every_target_weighs_the_same_whatever_the_split():
    microbatches = [given([2.0] * 3, num_padding=9), given([1.0] * 9, num_padding=3)]
    assert global_mean(microbatches) == pytest.approx(1.25, abs=1e-15)
    for hidden, b in microbatches:
        expected = (b.labels_BT != IGNORE).double() / 12
        assert torch.equal(hidden.grad[..., 0], expected)


def test_c12_the_split_does_not_change_the_gradient_of_the_weight():
    hidden, weight, labels = case(rows=4)
    expected = torch.autograd.grad(plain(hidden, weight, labels, 2.0, 0.1)[0], weight)[0]
    for split in (1, 2, 3, 4):
        weight.grad = None
        for h, y in zip(hidden.split(split), labels.split(split)):
            linear_cross_entropy(h, weight, y, 2.0, 0.1, chunk_tokens=3)[0].backward()
        assert close(weight.grad, expected, 1e-12)


def _rank_mean(rank: int, world: int) -> float:
    hidden, b = [given([2.0, 2.0]), given([1.0] * 6)][rank]
    sums = torch.stack([Given()(HeadInput(hidden, hidden), b).sum.detach(), torch.tensor(float(Given().weight(b)))])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def test_c13_ranks_weigh_by_their_targets():
    assert run_ranks(_rank_mean, 2) == [1.25, 1.25]


def test_c13_the_logged_loss_is_not_scaled_by_accumulation():
    assert global_mean([given([2.0] * 5) for _ in range(4)]) == 2.0


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_c13_evaluation_does_not_depend_on_the_batch_size(rows):
    values = [float(i) for i in range(9)]
    parts = [values[i : i + rows] for i in range(0, 9, rows)]
    assert global_mean([given(part, num_padding=rows - len(part)) for part in parts]) == 4.0


def test_c19_a_rank_without_targets_leaves_the_global_loss_alone():
    hidden, weight, labels = case(ignored=0)
    empty = torch.full_like(labels, IGNORE)
    loss = CrossEntropy(chunk_tokens=5)
    results = [loss(HeadInput(hidden, weight), batch(y)) for y in (labels, empty)]
    expected = plain(hidden, weight, labels)[0] / labels.numel()
    mean = sum(r.sum for r in results) / sum(loss.weight(batch(y)) for y in (labels, empty))
    assert close(mean, expected, 1e-12)
    grad, expected_grad = (torch.autograd.grad(x, weight)[0] for x in (mean, expected))
    assert close(grad, expected_grad, 1e-12)


class Model(torch.nn.Module):
    def __init__(self, width: int, vocab: int):
        super().__init__()
        self.table = torch.nn.Embedding(vocab, width)
        self.block = torch.nn.Linear(width, width)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(self.block(self.table(tokens_BT)), self.table.weight, labels_BT, 3.0, 0.1, 4)[0]


def _model_and_data():
    torch.manual_seed(0)
    model = Model(6, 13).double()  # 13 rows do not divide by 2
    tokens_BT, labels_BT = torch.randint(13, (4, 5)), torch.randint(13, (4, 5))
    labels_BT[0] = IGNORE
    return model, tokens_BT, labels_BT


def _sharded_gradients(rank: int, world: int) -> dict[str, torch.Tensor]:
    model, tokens_BT, labels_BT = _model_and_data()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (model, model.block):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    (model(tokens_BT[rank::world], labels_BT[rank::world]) / 15).backward()
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}


def test_sharded_weights_give_the_gradients_of_one_process():
    model, tokens_BT, labels_BT = _model_and_data()
    (model(tokens_BT, labels_BT) / 15).backward()
    for grads in run_ranks(_sharded_gradients, 2):
        for name, param in model.named_parameters():
            assert close(grads[name], param.grad, 1e-12)
