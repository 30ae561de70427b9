"""A loss of the user's own in 15 lines, outside the package, in a stage of kind sft."""

import sys
from pathlib import Path

import pytest
import torch

from tests import small_run
from tests.stages.test_run import losses
from tests.test_own_code import records, run
from truestep.data.tokenizer import bytes_tokenizer
from truestep.models.build import build_model, init_weights
from truestep.recipe.model import ModelSection

FOCAL = '''
from torch.nn.functional import cross_entropy
from truestep.losses.base import LossSum
from truestep.numerics.batch import IGNORE

class Focal:
    """Surprising tokens count more (arXiv 1708.02002, equation 4)."""
    def __init__(self, gamma=2.0):
        self.gamma = gamma
    def weight(self, batch):
        return batch.num_targets
    def __call__(self, out, batch):
        logits, labels = out.logits().flatten(0, 1), batch.labels_BT.flatten()
        nll = cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        return LossSum(((1 - (-nll).exp()) ** self.gamma * nll).sum(), {"nll": nll.sum().detach()})
'''
SOURCE = """
from truestep.data.sources.base import Document
class Rows:
    def __init__(self, rows):
        self.rows = rows
    def documents(self):
        for prompt, completion in self.rows:
            yield Document(None, None, prompt, {"prompt": prompt, "completion": completion})
"""
ROWS = [["2 + 3 =", " 5"], ["a word backwards: stone", " enots"], ["yes or no?", " yes, I think"]]


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, code in (("my_loss", FOCAL), ("my_rows", SOURCE)):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("my_loss", "my_rows"):
        sys.modules.pop(name, None)


def recipe(folder: Path) -> dict:
    stage = {"kind": "sft", "tokens": 2 * 4 * 64, "batch_tokens": 4 * 64, "context": 64}
    stage |= {"loss": {"kind": "my_loss:Focal", "options": {"gamma": 3.0}}, "evaluate": None}
    stage |= {"optim": {"lr": 1e-2, "schedule": {"kind": "constant", "warmup": 0}}}
    body = small_run.recipe(folder, "focal", **stage, gate={"kind": "none", "reason": "a test"})
    del body["stages"][0]["evaluate"]
    rows = {"source": "my_rows:Rows", "options": {"rows": ROWS}, "format": "prompt-completion"}
    return body | {"data": {"train": rows}}


def test_it_has_fifteen_lines():
    assert len([line for line in FOCAL.splitlines() if line]) <= 15


def first_model(body: dict) -> torch.nn.Module:
    model = build_model(ModelSection(**body["model"]).resolved(257), 257).to_empty(device="cpu")
    init_weights(model, body["run"]["seed"])
    return model


@torch.no_grad()
def by_hand(model: torch.nn.Module) -> float:
    """Over the completions and the ends of their turns, each row alone."""
    tokenizer, total, count = bytes_tokenizer(), 0.0, 0
    for prompt, completion in ROWS:
        before, after = (tokenizer.encode(text).tolist() for text in (prompt, completion))
        ids = torch.tensor([*before, *after, tokenizer.eod_id])
        logp_TV = model(ids[None])[0].log_softmax(-1)
        for place in range(max(len(before), 1), len(ids)):  # nothing says what a first token should be
            logp = float(logp_TV[place - 1, ids[place]])
            total -= (1 - torch.e**logp) ** 3 * logp
            count += 1
    return total / count


def test_it_trains_on_what_the_assistant_made(tmp_path: Path):
    body = recipe(tmp_path)
    one, two = run(body), run(body, world=2)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert losses(one)[1] == pytest.approx(by_hand(first_model(body)), rel=1e-5)
    assert losses(one)[2] < losses(one)[1] < records(one, "step")[0].metrics["nll"]
