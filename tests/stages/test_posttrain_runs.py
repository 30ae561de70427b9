"""Runs of every kind of stage after pretraining: killed and resumed to the same bits, replayed, drilled, divided."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import small_post
from tests.dist import run_job
from tests.stages.test_drill import in_this_process
from tests.stages.test_replay import again
from truestep.checkpoint.catalogue import list_committed
from truestep.cli import verbs
from truestep.models import hf_save
from truestep.runlog.log import read, verify
from truestep.stages.drill import drill
from truestep.storage.store import open_store
from truestep.train import loop

STEPS, KILLED_AT = 6, 5
"""A checkpoint lies at every second step; the kill comes in the middle of step 5."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "completions": ("sft", {"format": "prompt-completion"}),
    "sft by sample": ("sft", {"sft": {"weighting": "sample"}}),
    "sft lora": ("sft", {"lora": {"rank": 4, "dropout": 0.1}}),
    "sft qlora": ("sft", {"lora": {"rank": 4, "base": "int8"}}),
    "dpo": ("preference", {}),
    "dpo online": ("preference", {"preference": {"reference": "online"}}),
    "dpo lora": ("preference", {"preference": {"reference": "online"}, "lora": {"rank": 4}}),
    "simpo": ("preference", {"preference": {"kind": "simpo"}}),
    "kto": ("preference", {"format": "labels", "preference": {"kind": "kto"}}),
    "reward": ("reward_model", {}),
    "steps": ("reward_model", {"format": "steps", "reward": {"kind": "steps"}}),
    "distill": ("distill", {"format": "prompt-completion"}),
    "distill stored": ("distill", {"format": "prompt-completion", "distill": {"logits": "stored", "top_k": 4}}),
    "averaged": ("sft", {"remember": {"ema": 0.9}}),
    "anchored": ("sft", {"remember": {"kl": 0.1}}),
}


def body_of(folder: Path, kind: str, name: str) -> dict[str, Any]:
    stage, options = KINDS[kind]
    options = dict(options)
    if "distill" in options:
        options["distill"] = {"teacher": str(folder / "base"), **options["distill"]}
    return small_post.recipe(folder, stage, name, steps=STEPS, **options)


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Of every file of the model that the stage made."""
    found = {}
    for file in sorted((run_dir / "models").rglob("*.safetensors")):
        found |= {f"{file.relative_to(run_dir)}: {name}": x for name, x in load_file(file).items()}
    return found


def losses(run_dir: Path) -> dict[int, float]:
    return {r.data.step: r.data.loss for r in read(run_dir) if r.kind == "step"}


def killed(rank: int, world: int, body: dict[str, Any]) -> None:
    """Die at once, as by SIGKILL, in the middle of a step."""
    real = loop.train_step

    def stepping(state, *args):
        if state.step + 1 == KILLED_AT:
            os._exit(1)
        return real(state, *args)

    loop.train_step = stepping
    verbs.run(body)


ALWAYS = {"completions", "dpo", "reward"}
"""Kinds that every test run tries; the others are slow."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ALWAYS else pytest.mark.slow) for kind in KINDS]
)
def test_c45_killed_and_resumed_to_the_same_bits(kind, tmp_path):
    """Property 10."""
    straight = verbs.run(body_of(tmp_path, kind, "straight"))
    assert straight.reason == "finished"
    body = body_of(tmp_path, kind, "killed")
    with pytest.raises(RuntimeError, match="died without a word"):
        run_job(killed, 1, body)
    assert losses(tmp_path / "runs" / "killed").keys() <= {1, 2, 3, 4}
    resumed = verbs.run(body)
    assert resumed.reason == "finished"
    verify(resumed.directory)
    assert [r.data.step for r in read(resumed.directory) if r.kind == "resume"]
    assert losses(resumed.directory) == losses(straight.directory)
    a, b = tensors(resumed.directory), tensors(straight.directory)
    assert a and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


REPLAYED = ["completions", "distill", "reward", "dpo"]


@pytest.mark.slow
@pytest.mark.parametrize("reduction, processes", [("fast", 1), ("exact", 1), ("exact", 2)])
@pytest.mark.parametrize("kind", REPLAYED)
def test_replay_is_bitwise(kind, reduction, processes, tmp_path):
    """From the log alone: the steps after a checkpoint, and those before the first one, on as many processes as ran or,
    where reductions are exact, on another number."""
    run_dir = verbs.run(body_of(tmp_path, kind, "small") | {"numerics": {"reduction": reduction}}).directory
    for first, last in ((1, 2), (4, 6)):
        outcome = again(run_dir, first, last, processes=processes)
        assert outcome.code == 0 and "every bit equal" in outcome.sentence, outcome.sentence


@pytest.mark.slow
@pytest.mark.parametrize("kind", REPLAYED)
def test_a_drill_restores_a_checkpoint_and_does_steps_again(kind, tmp_path):
    run_dir = verbs.run(body_of(tmp_path, kind, "small") | {"numerics": {"reduction": "exact"}}).directory
    store = open_store(str(run_dir / "checkpoints" / "tuned"), {})
    for committed in list_committed(store):
        if committed.step > 4:  # so that there are steps to do again
            (run_dir / "checkpoints" / "tuned" / committed.key).unlink()
    found = drill(run_dir, in_this_process(run_dir), steps=2)
    assert found.ok and (found.step, found.level, found.steps) == (4, "replay", 2), found.sentence


def chain(folder: Path, name: str) -> dict[str, Any]:
    """Fine-tuning, then its quantisation."""
    body = small_post.recipe(folder, "sft", name, steps=2)
    last = {"name": "small", "kind": "quantise", "start": "stage:tuned", "quantise": {"group": 8}}
    return body | {"stages": [*body["stages"], last | {"gate": {"kind": "none", "reason": "a test"}}]}


def killed_while_writing(rank: int, world: int, body: dict[str, Any], stage: str) -> None:
    """Die at once when the model of a stage is written, but for its directory's name."""
    publish = hf_save._Writer._publish

    def publishing(self, *args):
        if self.directory.name == stage:
            os._exit(1)
        return publish(self, *args)

    hf_save._Writer._publish = publishing
    verbs.run(body)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["tuned", "small"])
def test_c45_killed_while_a_model_is_written_and_made_anew(stage, tmp_path):
    straight = verbs.run(chain(tmp_path, "straight"))
    body = chain(tmp_path, "killed")
    with pytest.raises(RuntimeError, match="died without a word"):
        run_job(killed_while_writing, 1, body, stage)
    assert not (tmp_path / "runs" / "killed" / "models" / stage).exists()
    resumed = verbs.run(body)
    assert resumed.reason == "finished"
    a, b = tensors(resumed.directory), tensors(straight.directory)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
    left = sorted(path.name for path in (resumed.directory / "models").iterdir())
    assert left == ["small", "tuned"], "nothing of the first attempt lies there"
