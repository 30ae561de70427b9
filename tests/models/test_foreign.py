"""A user's own module: called by the names it has, trained on its logits or its loss, never ignored."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.dist import run_ranks
from tests.models.families import tiny
from tests.models.sections import VOCAB
from truestep.errors import ModelError, UserError
from truestep.losses.cross_entropy import CrossEntropy
from truestep.models.build import build_model, init_weights
from truestep.models.foreign import ForeignModel
from truestep.models.hf_save import save_hf
from truestep.models.load import load_model, tensors_of
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import Logits, OwnLoss
from truestep.numerics.roles import Role
from truestep.recipe.model import ModelSection


@dataclass
class Output:
    logits: torch.Tensor | None = None
    loss: torch.Tensor | None = None


class Tiny(nn.Module):
    """Embedding, one normalised layer, tied head. `gives` chooses what comes back."""

    def __init__(self, vocab_size: int, width: int = 8, gives: str = "tensor"):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))])
        self.position = nn.Parameter(torch.zeros(1, 1, width))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("table_of_ones", torch.ones(3), persistent=False)
        self.gives = gives

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.table(input_ids) + self.position
        for layer in self.layers:
            x = x + layer(x) * self.scale
        logits = self.head(x)
        if self.gives == "tensor":
            return logits
        if self.gives == "nothing":
            return [logits]
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.gives == "shifted":
            loss = None if labels is None else cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if self.gives == "other":
            loss = None if loss is None else loss * 2
        return Output(logits=None if self.gives == "loss" and labels is not None else logits, loss=loss)


class Positional(nn.Module):
    def __init__(self, vocab_size: int):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, idx: torch.Tensor, position_ids: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
        return self.table(idx) + position_ids[..., None] + document_ids[..., None]


def section(cls: str = "Tiny", **options: Any) -> ModelSection:
    return ModelSection(module=f"tests.models.test_foreign:{cls}", options=options)


def batch(ignored: bool = False) -> Batch:
    tokens_BT = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    labels_BT = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))
    labels_BT[0, 2] = IGNORE
    labels_BT = torch.full_like(labels_BT, IGNORE) if ignored else labels_BT
    positions_BT = torch.arange(6).expand(2, 6)
    return Batch(tokens_BT, labels_BT, positions_BT, torch.zeros(2, 6, dtype=torch.int32))


def total(out: Logits | OwnLoss, given: Batch) -> torch.Tensor:
    return CrossEntropy()(out, given).sum


def run(model: nn.Module, given: Batch) -> torch.Tensor:
    head: Callable[[Any], torch.Tensor] = partial(total, given=given)
    return model(given.tokens_BT, given.positions_BT, given.documents_BT, head=head, labels_BT=given.labels_BT)


def gradients(model: nn.Module, given: Batch) -> list[torch.Tensor]:
    return list(torch.autograd.grad(run(model, given), list(model.parameters())))


@pytest.mark.parametrize("gives", ["loss", "both", "shifted"])
def test_logits_and_loss_train_alike(gives: str):
    """The loss is a mean over targets; times their number it is our sum. Twice: labels are withheld after the check."""
    plain = build_model(section(), VOCAB)
    model = build_model(section(gives=gives), VOCAB)
    for _ in range(2):
        torch.testing.assert_close(run(model, batch()), run(plain, batch()))
        torch.testing.assert_close(gradients(model, batch()), gradients(plain, batch()))


@pytest.mark.parametrize("gives", ["tensor", "loss", "both", "shifted"])
def test_no_targets_give_zero(gives: str):
    model = build_model(section(gives=gives), VOCAB)
    assert run(model, batch(ignored=True)) == 0
    assert all((g == 0).all() for g in gradients(model, batch(ignored=True)))


def test_a_loss_that_would_be_ignored_is_refused():
    with pytest.raises(ModelError, match="not the mean cross-entropy of its logits"):
        run(build_model(section(gives="other"), VOCAB), batch())


def test_neither_logits_nor_loss_is_refused():
    with pytest.raises(ModelError, match="returns a list, neither"):
        run(build_model(section(gives="nothing"), VOCAB), batch())


def test_loss_alone_cannot_be_evaluated():
    class LossOnly(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> Output:
            return Output(loss=torch.zeros(()))

    model = ForeignModel(LossOnly(), section("LossOnly"))
    with pytest.raises(ModelError, match="loss without logits"):
        model(batch().tokens_BT)


def test_logits_in_evaluation_from_a_module_that_trains_on_its_loss():
    model, given = build_model(section(gives="loss"), VOCAB).eval(), batch()
    seen = model(given.tokens_BT, head=lambda out: out, labels_BT=given.labels_BT)
    assert isinstance(seen, Logits)
    assert isinstance(model.train()(given.tokens_BT, head=lambda out: out, labels_BT=given.labels_BT), OwnLoss)
    with pytest.raises(ModelError, match="loss without logits"):
        OwnLoss(torch.zeros(())).logits()


def test_z_loss_beside_an_own_loss_is_refused():
    with pytest.raises(UserError, match=r"z_loss = 0\.1 would not be used"):
        CrossEntropy(z_loss=0.1)(OwnLoss(torch.zeros(())), batch())


def test_arguments_go_by_name():
    model, given = build_model(section("Positional"), VOCAB), batch()
    assert isinstance(model, ForeignModel) and model.takes_documents
    assert not build_model(section(), VOCAB).takes_documents
    out = model(given.tokens_BT, given.positions_BT, given.documents_BT)
    assert torch.equal(out, model.module.table(given.tokens_BT) + given.positions_BT[..., None])


def test_a_model_of_transformers_runs_unchanged():
    """Its labels are shifted inside; ours are shifted already. The loss comes from its logits."""
    hf = tiny("llama")
    given = batch()
    model = ForeignModel(hf, section())
    out = run(model, given)
    wanted = cross_entropy(hf(given.tokens_BT).logits.flatten(0, 1), given.labels_BT.flatten(), reduction="sum")
    torch.testing.assert_close(out, wanted)


def test_trains_under_autocast_unchanged():
    for gives in ("tensor", "loss", "both"):
        model = build_model(section(gives=gives), VOCAB)
        rate = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(20):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(model, batch()) / batch().num_targets
            loss.backward()
            rate.step()
            rate.zero_grad()
            losses.append(loss.item())
        assert loss.dtype == torch.float32
        assert losses[-1] < losses[0] - 0.3, gives


def test_roles_and_blocks():
    model = build_model(section(), VOCAB)
    assert model.roles() == {
        "module.position": Role.OTHER,
        "module.table.weight": Role.EMBEDDING,
        "module.layers.0.0.weight": Role.NORM,
        "module.layers.0.0.bias": Role.BIAS,
        "module.layers.0.1.weight": Role.MATRIX,
        "module.layers.0.1.bias": Role.BIAS,
    }
    assert set(model.roles()) == {name for name, _ in model.named_parameters()}
    assert model.blocks is model.module.layers


def test_initialised_by_the_seed_alone():
    first, second, third = (build_model(section(), VOCAB) for _ in range(3))
    state = torch.get_rng_state()
    for model, seed in ((first, 1), (second, 1), (third, 2)):
        model.to_empty(device="cpu")
        init_weights(model, seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.module.table.weight, second.module.table.weight)
    assert not torch.equal(first.module.table.weight, third.module.table.weight)
    assert first.module.scale == 2 and first.module.table_of_ones.tolist() == [1, 1, 1]
    assert first.module.head.weight is first.module.table.weight


def test_saved_and_loaded(tmp_path: Path):
    model = build_model(section(), VOCAB)
    save_hf(tmp_path / "model", tensors_of(model), model.section)
    with pytest.raises(ModelError, match="name that module yourself"):
        load_model(tmp_path / "model")
    again = load_model(tmp_path / "model", own_module=model.section.module)
    assert torch.equal(again(batch().tokens_BT), model(batch().tokens_BT))
    assert again.module.head.weight is again.module.table.weight


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (section(wrong=1), "does not take options"),
        (section("Output"), "not a torch.nn.Module"),
        (section("Missing"), "has no 'Missing'"),
    ],
)
def test_wrong_modules_are_refused(given: ModelSection, words: str):
    with pytest.raises(Exception, match=words) as error:
        build_model(given, VOCAB)
    assert "tests.models.test_foreign" in str(error.value)


def _fsdp(rank: int, world: int) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build_model(section(gives="loss"), VOCAB)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    init_weights(model, 5)
    run(model, batch()).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def test_shards_under_fsdp():
    model = build_model(section(), VOCAB)
    init_weights(model, 5)
    torch.testing.assert_close(run_ranks(_fsdp, 2)[0], gradients(model, batch()))
