"""A user's own loss, data source, model and optimizer, each in one file outside the package, named by import path."""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests import small_run
from tests.dist import run_job
from tests.refusals import truestep, write_recipe
from tests.stages.test_run import losses, stop_after, weights
from truestep.cli import verbs
from truestep.data.loader import Corpus, Loader
from truestep.data.store import TokenStore
from truestep.data.tokenizer import load_tokenizer
from truestep.errors import ModelError
from truestep.models.build import build_model, init_weights
from truestep.models.load import load_model
from truestep.numerics.batch import IGNORE, Batch
from truestep.recipe.model import ModelSection
from truestep.runlog.log import read

EXAMPLES = Path(__file__).parent.parent / "examples"

OWN = '''
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from truestep.losses.base import LossSum
from truestep.numerics.batch import IGNORE


class TwiceTheWeight:
    """Cross-entropy that counts every target twice, so that its mean is half."""

    def weight(self, batch):
        return 2 * batch.num_targets

    def __call__(self, out, batch):
        logits = out.logits()
        nll = cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORE, reduction="sum")
        hits = (logits.argmax(-1) == batch.labels_BT).sum()
        return LossSum(nll, {"accuracy": hits.detach()})


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Tied(nn.Module):
    """Tied table and head, dropout, an object with .logits and .loss."""

    def __init__(self, vocab_size, dropout=0.0):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, vocab_size, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids, labels=None):
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        logits = self.head(x)
        loss = None if labels is None else cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return Output(logits, loss)


class LossAlone(Tied):
    """Gives its loss in training, and logits when it is asked without labels."""

    def forward(self, input_ids, labels=None):
        out = super().forward(input_ids, labels)
        return out if labels is None else Output(None, 3 * out.loss)


def plain_sgd(named_params, roles, lr, momentum=0.0):
    return torch.optim.SGD([param for _, param in named_params], lr=lr, momentum=momentum)


class PlainTensor:
    def weight(self, batch):
        return batch.num_targets

    def __call__(self, out, batch):
        return out.logits().sum()


class NoWeight:
    def __call__(self, out, batch):
        return LossSum(out.logits().sum())


class ShortLogits(Tied):
    def forward(self, input_ids):
        return super().forward(input_ids).logits[..., :100]


class Strings:
    def documents(self):
        yield "only text"


class NoDocuments:
    pass


class Broken:
    def documents(self):
        raise OSError("the tape is torn")


def half_sgd(named_params, roles, lr):
    return torch.optim.SGD([named_params[0][1]], lr=lr)


def no_optimizer(named_params, roles, lr):
    return "adam"
'''


@pytest.fixture(autouse=True)
def own_code(tmp_path, monkeypatch):
    """The examples, and a package of the user's own, where Python finds them."""
    package = tmp_path / "packages" / "my_lab"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "things.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        del sys.modules[name]


def own_recipe(folder: Path, name: str, module: str = "Tied", steps: int = 6, **changes: Any) -> dict[str, Any]:
    """The small run with a model of the user's own, whose first step is at the full rate."""
    schedule = {"kind": "constant", "warmup": 0}
    stage: dict[str, Any] = {"tokens": steps * 12 * 32, "mask_documents": False, "evaluate": {"data": "heldout"}}
    stage |= {"gate": {"kind": "heldout", "max_loss": 100.0}}
    stage |= {"optim": {"lr": 1e-2, "schedule": schedule}} | changes
    body = small_run.recipe(folder, name, **stage)
    body["model"] = {"module": f"my_lab.things:{module}"}
    return body


def _run(rank: int, world: int, body: dict[str, Any]) -> str:
    return verbs.run(body).reason


def run(body: dict[str, Any], world: int = 1) -> Path:
    """The run's directory after `world` ranks carried it out."""
    body = body | {"run": body["run"] | {"name": f"{body['run']['name']}-{world}"}}
    reasons = [verbs.run(body).reason] if world == 1 else run_job(_run, world, body)
    assert reasons == ["finished"] * world
    return Path(body["run"]["dir"]) / body["run"]["name"]


def first_batch(run_dir: Path, body: dict[str, Any]) -> Batch:
    """What the first step trains on."""
    stage = body["stages"][0]
    (path,) = run_dir.parent.glob(".data/train-*/tokens.bin")
    loader = Loader([Corpus(TokenStore.open(path.parent))], stage["context"], body["run"]["seed"], False)
    return loader.rows(loader.global_rows(0, stage["batch_tokens"] // stage["context"]))


def first_model(body: dict[str, Any]) -> torch.nn.Module:
    model = build_model(ModelSection(**body["model"]), 257)
    init_weights(model, body["run"]["seed"])
    return model


def records(run_dir: Path, kind: str) -> list[Any]:
    return [record.data for record in read(run_dir) if record.kind == kind]


def test_the_examples_train_alike_on_one_rank_and_on_two(tmp_path):
    """examples/own.toml, shortened: source, model and loss are those of the three files beside it."""
    body = tomllib.loads((EXAMPLES / "own.toml").read_text())
    body["run"] |= {"dir": str(tmp_path / "runs"), "seed": 3}
    for section in body["data"].values():
        section["options"] = {"count": 300}
    body["model"]["options"] = {"width": 16, "depth": 2}
    del body["stages"][0]["sample"]
    schedule = {"schedule": {"kind": "constant", "warmup": 0}}
    body["stages"][0] |= {
        "tokens": 6 * 512,
        "batch_tokens": 512,
        "gate": {"max_loss": 9.0},
        "optim": {"lr": 3e-3} | schedule,
    }
    body["stages"][0]["loss"]["options"]["smoothing"] = 0.5
    body["machine"] = {"microbatch_rows": 2, "precision": "float32", "device": "cpu", "threads": 1, "data_workers": 1}
    one, two = run(body), run(body, world=2)

    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    (store,) = {path.parent for path in (tmp_path / "runs").glob(".data/train-*/tokens.bin")}
    from own_source import Sums

    tokenizer, opened = load_tokenizer(store / "tokenizer"), TokenStore.open(store)
    texts = {document.text for document in Sums(300).documents()}
    assert {tokenizer.decode(opened.document(i)[:-1]) for i in range(20)} <= texts

    batch, model = first_batch(one, body), first_model(body)
    logits_NV, labels_N = model(batch.tokens_BT).flatten(0, 1), batch.labels_BT.flatten()
    smooth = cross_entropy(logits_NV, labels_N, ignore_index=IGNORE, label_smoothing=0.5).item()
    plain = cross_entropy(logits_NV, labels_N, ignore_index=IGNORE).item()
    assert losses(one)[1] == pytest.approx(smooth, rel=1e-6) and abs(smooth - plain) > 1e-3

    with pytest.raises(ModelError, match=r"needs the code of own_model:Convolutions; if you trust it"):
        load_model(one / "models" / "base")
    loaded = load_model(one / "models" / "base", own_module="own_model:Convolutions")
    assert type(loaded.module).__name__ == "Convolutions"
    assert torch.equal(loaded.module.head.weight, weights(one)["head.weight"])
    assert not torch.equal(loaded.module.head.weight, model.module.head.weight)
    from own_model import Convolutions

    Convolutions(257, width=16, depth=2).load_state_dict(weights(one))  # the file is the module's own, without truestep


def test_own_loss_is_divided_by_its_own_weight(tmp_path):
    """Twice the weight halves the loss and the gradient, on any number of ranks; its metrics are logged."""
    own = {"kind": "my_lab.things:TwiceTheWeight"}
    plain = run(own_recipe(tmp_path, "plain"))
    body = own_recipe(tmp_path, "twice", loss=own)
    one, two = run(body), run(body, world=2)
    assert losses(one)[1] == pytest.approx(losses(plain)[1] / 2, rel=1e-6)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    norms = [records(run_dir, "step")[0].grad_norm for run_dir in (plain, one, two)]
    assert norms[1:] == pytest.approx([norms[0] / 2] * 2, rel=1e-5)
    accuracies = [[step.metrics["accuracy"] for step in records(run_dir, "step")] for run_dir in (one, two)]
    assert accuracies[1] == pytest.approx(accuracies[0], rel=1e-5) and 0 < max(accuracies[0]) <= 0.5


def test_model_with_tied_weights_and_dropout_under_autocast(tmp_path):
    """Dropout belongs to the microbatch, not to the rank that has it, so two ranks drop what one does."""
    body = own_recipe(tmp_path, "tied") | {"model": {"module": "my_lab.things:Tied", "options": {"dropout": 0.5}}}
    body = small_run.with_machine(body, precision="bfloat16")
    one, two = run(body), run(body, world=2)
    without = run(own_recipe(tmp_path, "without"))
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
    assert losses(without)[6] != pytest.approx(losses(one)[6], rel=2e-2)
    model = load_model(two / "models" / "base", own_module="my_lab.things:Tied")
    assert model.module.head.weight is model.module.table.weight and model.module.table.weight.dtype == torch.float32
    stored = [name for name in weights(two) if "table" in name or "head" in name]
    assert len(stored) == 1


def test_dropout_is_the_same_on_any_number_of_ranks(tmp_path):
    body = own_recipe(tmp_path, "drop") | {"model": {"module": "my_lab.things:Tied", "options": {"dropout": 0.5}}}
    assert losses(run(body, world=2)) == pytest.approx(losses(run(body)), rel=1e-5)


def test_model_that_gives_its_loss_alone(tmp_path):
    """Its mean over targets is what is trained on: three times the cross-entropy here. Evaluation asks for logits."""
    plain, body = run(own_recipe(tmp_path, "plain")), own_recipe(tmp_path, "alone", module="LossAlone")
    one, two = run(body), run(body, world=2)
    assert losses(one)[1] == pytest.approx(3 * losses(plain)[1], rel=1e-5)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


def test_own_optimizer(tmp_path):
    """One step of plain descent, by hand."""
    schedule = {"kind": "constant", "warmup": 0}
    optim = {"kind": "my_lab.things:plain_sgd", "lr": 0.5, "clip_norm": 0.0, "schedule": schedule}
    body = own_recipe(tmp_path, "descent", steps=1, optim=optim)
    one, two = run(body), run(body, world=2)
    model, batch = first_model(body), first_batch(one, body)
    logits_NV = model(batch.tokens_BT).flatten(0, 1)
    cross_entropy(logits_NV, batch.labels_BT.flatten(), ignore_index=IGNORE).backward()
    for run_dir in (one, two):
        for name, found in weights(run_dir).items():
            parameter = dict(model.module.named_parameters())[name]
            torch.testing.assert_close(found, (parameter - 0.5 * parameter.grad).detach(), rtol=1e-4, atol=1e-6)


def test_own_optimizer_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    schedule = {"kind": "constant", "warmup": 0}
    optim = {"kind": "my_lab.things:plain_sgd", "lr": 0.1, "options": {"momentum": 0.9}, "schedule": schedule}
    whole = run(own_recipe(tmp_path, "whole", optim=optim))
    body = own_recipe(tmp_path, "parts", optim=optim)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert verbs.run(body).reason == "stopped"
    outcome = verbs.run(body)
    assert outcome.reason == "finished" and losses(outcome.directory) == losses(whole)


def test_changed_code_of_a_source_is_not_taken_for_the_old_one(tmp_path):
    """Its store is named by its code too: what the old code gave is not silently used again."""
    body = small_run.recipe(
        tmp_path, tokens=2 * 384, gate={"kind": "none", "reason": "a test"}, optim={"schedule": {"warmup": 0}}
    )
    del body["stages"][0]["evaluate"], body["data"]["heldout"]
    file = tmp_path / "packages" / "my_corpus.py"
    for number, word in enumerate(("first", "second")):
        file.write_text(
            "from truestep.data.sources.base import Document\n"
            "class Words:\n"
            "    def documents(self):\n"
            f"        yield Document('{word} ' * 2000, None, 'made up')\n"
        )
        sys.modules.pop("my_corpus", None)
        body["data"] = {"train": {"source": "my_corpus:Words"}}
        body["run"] |= {"name": word}
        assert verbs.run(body).reason == "finished"
        assert len(list((tmp_path / "runs").glob(".data/train-*"))) == number + 1


MISUSE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "loss gives a tensor": ({"loss": "PlainTensor"}, ["loss PlainTensor returned a Tensor", "LossSum"]),
    "loss lacks weight": ({"loss": "NoWeight"}, ["lacks weight(batch)"]),
    "loss takes no options": ({"loss": "PlainTensor", "loss_options": {"colour": 1}}, ["colour", "loss.options"]),
    "model takes no options": ({"model": "Tied", "model_options": {"colour": 1}}, ["colour", "my_lab.things:Tied"]),
    "model gives short logits": ({"model": "ShortLogits"}, ["logits of shape (1, 32, 100)", "at least 257"]),
    "model is no module": ({"model": "Strings"}, ["made a Strings, not a torch.nn.Module"]),
    "source gives strings": ({"source": "Strings"}, ["gave a str as document 0", "Document"]),
    "source lacks documents": ({"source": "NoDocuments"}, ["lacks documents()", "base.Source"]),
    "source takes no options": ({"source": "Strings", "source_options": {"colour": 1}}, ["does not use 'colour'"]),
    "optimizer leaves some out": ({"optim": "half_sgd"}, ["leaves out", "give it every parameter"]),
    "optimizer is none": ({"optim": "no_optimizer"}, ["made a str", "torch.optim.Optimizer"]),
    "documents kept apart": ({"mask": True}, ["no `document_ids`", "mask_documents = false"]),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_one_sentence(case, capsys, tmp_path):
    wrong, parts = MISUSE[case]
    body = own_recipe(tmp_path, "wrong", module=wrong.get("model", "Tied"), mask_documents=wrong.get("mask", False))
    body["model"]["options"] = wrong.get("model_options", {})
    stage = body["stages"][0]
    if "loss" in wrong:
        stage["loss"] = {"kind": f"my_lab.things:{wrong['loss']}", "options": wrong.get("loss_options", {})}
    if "optim" in wrong:
        stage["optim"] = {"kind": f"my_lab.things:{wrong['optim']}", "schedule": {"kind": "constant", "warmup": 0}}
    if "source" in wrong:
        source = {"source": f"my_lab.things:{wrong['source']}", "options": wrong.get("source_options", {})}
        body["data"]["train"] = source
    truestep(capsys, "run", write_recipe(tmp_path, body)).refused(*parts)
    assert not (tmp_path / "runs" / "wrong" / "models").exists()
    assert not list((tmp_path / "runs").rglob("commits/0*"))


def test_what_own_code_raises_itself_is_shown_with_its_place(tmp_path):
    """An error of the user's own code is no bad input: its traceback is what the user needs."""
    body = own_recipe(tmp_path, "broken")
    body["data"]["train"] = {"source": "my_lab.things:Broken"}
    with pytest.raises(OSError, match="the tape is torn"):
        verbs.run(body)
    end = records(tmp_path / "runs" / "broken", "attempt_end")[0]
    assert (end.reason, end.error) == ("failed", "OSError: the tape is torn")
    assert json.loads((tmp_path / "runs" / "broken" / "run.json").read_text())
