"""Stages of kind sft as whole runs: how long epochs are, that every sample is trained on in each, what is weighed how,
and that kills, other world sizes and a replay change none of it."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests import small_run
from tests.data.sample_fakes import ROWS
from tests.dist import run_job
from tests.refusals import truestep, write_recipe
from tests.stages.test_run import same_bits, stop_after
from truestep.cli import verbs
from truestep.data.sample_store import SampleStore
from truestep.models.load import load_model
from truestep.numerics.batch import IGNORE
from truestep.runlog.log import read, verify
from truestep.train import loop

NUM_ROWS, CONTEXT = 90, 40


def write_rows(folder: Path) -> Path:
    """Prompts and answers of uneven length, no two alike."""
    random, file = np.random.default_rng(0), folder / "rows.jsonl"
    rows = []
    for number in range(NUM_ROWS):
        word = "".join(random.choice(list("abcdefgh"), size=int(random.integers(2, 6))))
        rows.append({"prompt": f"{number} {word} ", "completion": word[::-1] * int(random.integers(1, 4))})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def recipe(folder: Path, name: str = "tuned", **changes: Any) -> dict[str, Any]:
    """One stage from fresh weights. `changes` replace fields of the stage."""
    body = small_run.recipe(folder, name)
    file = folder / "rows.jsonl"
    data = {"source": ROWS, "path": str(file if file.exists() else write_rows(folder)), "format": "prompt-completion"}
    body["data"] = {split: data | {"split": split, "holdout": 0.2} for split in ("train", "heldout")}
    stage = {
        "name": "tuned",
        "kind": "sft",
        "data": "train",
        "context": CONTEXT,
        "epochs": 2,
        "batch_tokens": 4 * CONTEXT,
        "optim": {"lr": 3e-3, "schedule": {"kind": "constant", "warmup": 0}},
        "evaluate": {"data": "heldout"},
        "gate": {"kind": "heldout", "max_loss": 6.0},
    }
    return body | {"stages": [stage | changes]}


def steps(run_dir: Path) -> dict[int, Any]:
    return {r.data.step: r.data for r in read(run_dir) if r.kind == "step"}


def started(run_dir: Path) -> Any:
    return next(r.data for r in read(run_dir) if r.kind == "stage_start")


def store_of(run_dir: Path, name: str = "train") -> SampleStore:
    paths = json.loads((run_dir / "data.json").read_text())["paths"]
    return SampleStore.open(run_dir.parent / ".data" / paths[name])


def samples_of(run_dir: Path, name: str = "train") -> list[tuple[list[int], list[bool]]]:
    """(ids, whether each is a target) of every sample of a store."""
    store = store_of(run_dir, name)
    units = [unit for number in range(store.num_documents) for unit in store.document(number)]
    return [(one.ids.tolist(), (one.roles > 0).tolist()) for (one,) in units]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the reference: one process, no interruption."""
    folder = tmp_path_factory.mktemp("sft")
    assert verbs.run(recipe(folder)).reason == "finished"
    return folder


def test_epochs_are_so_many_passes_in_whole_steps(straight: Path):
    run_dir = straight / "runs" / "tuned"
    start, done = started(run_dir), steps(run_dir)
    packing = start.settings["packing"]["train"]
    rows = 2 * packing["rows"]
    assert start.steps == -(-rows // 4) == len(done) and start.tokens == start.steps * 4 * CONTEXT
    targets = sum(sum(wanted[1:]) for _, wanted in samples_of(run_dir))
    assert packing["targets"] == targets and packing["samples"] == len(samples_of(run_dir)) > 60
    over = start.steps * 4 - rows  # rows of the third pass that fill up the last step
    trained = sum(step.targets for step in done.values())
    assert 2 * targets <= trained <= 2 * targets + over * CONTEXT and (over or trained == 2 * targets)
    assert (run_dir / "models" / "tuned" / "model.safetensors").exists()
    verify(run_dir)


def test_held_out_loss_is_that_of_the_targets_of_samples_alone(straight: Path):
    run_dir = straight / "runs" / "tuned"
    model = load_model(run_dir / "models" / "tuned").double()
    nlls = []
    for ids, wanted in samples_of(run_dir, "heldout"):
        logits_TV = model(torch.tensor([ids[:-1]]))[0]
        nll_T = cross_entropy(logits_TV, torch.tensor(ids[1:]), reduction="none")
        nlls.append(nll_T[torch.tensor(wanted[1:])])
    expected = torch.cat(nlls)
    found = [r.data for r in read(run_dir) if r.kind == "eval"][-1]
    assert found.targets == len(expected) and found.loss == pytest.approx(expected.mean().item(), rel=1e-5)


def test_a_loss_by_sample_is_the_mean_of_the_samples_means(straight: Path):
    """Of one step that is a pass over the data."""
    rows = started(straight / "runs" / "tuned").settings["packing"]["train"]["rows"]
    still = {"lr": 1e-12, "weight_decay": 0.0, "schedule": {"kind": "constant", "warmup": 0}}
    found = {}
    for weighting in ("sample", "token"):
        changes = {"epochs": 1, "batch_tokens": rows * CONTEXT, "optim": still, "sft": {"weighting": weighting}}
        run_dir = verbs.run(recipe(straight, f"by-{weighting}", **changes)).directory
        model = load_model(run_dir / "models" / "tuned").double()
        nlls = []
        for ids, wanted in samples_of(run_dir):
            nll_T = cross_entropy(model(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]), reduction="none")
            nlls.append(nll_T[torch.tensor(wanted[1:])])
        expected = torch.stack([one.mean() for one in nlls]) if weighting == "sample" else torch.cat(nlls)
        assert len(steps(run_dir)) == 1
        found[weighting] = steps(run_dir)[1].loss
        assert found[weighting] == pytest.approx(expected.mean().item(), rel=1e-6)
    assert abs(found["sample"] - found["token"]) > 1e-4


def ledger_of(folder: Path) -> Counter[tuple[int, ...]]:
    """How often each sample, by the labels that it trains, was trained on; what was done again counts once."""
    last: dict[tuple[int, int], tuple[float, list]] = {}
    for file in folder.glob("ledger-*"):
        for line in file.read_text().splitlines():
            step, number, when, samples = json.loads(line)
            if when > last.get((step, number), (0.0,))[0]:
                last[step, number] = when, samples
    return Counter(tuple(sample) for _, samples in last.values() for sample in samples)


def _life(rank: int, world: int, body: dict[str, Any], folder: Path, kill: int, stop: int) -> str:
    """One attempt that writes down what it trains on; killed in the middle of a step, or stopped after one."""
    import time

    patch = pytest.MonkeyPatch()
    real = loop.train_step
    file = (folder / f"ledger-{os.getpid()}").open("w")

    def stepping(state, batches, num_targets, questions):
        for index, batch in enumerate(batches):
            samples = []
            for documents, labels in zip(batch.documents_BT.tolist(), batch.labels_BT.tolist()):
                for number in sorted({d for d in documents if d >= 0}):
                    here = [y for d, y in zip(documents, labels) if d == number and y != IGNORE]
                    samples.append(here)
            number = state.number(index, state.parallel.groups.data_rank)
            if samples:
                file.write(json.dumps([state.step, number, time.time(), samples]) + "\n")
        file.flush()
        if state.step + 1 == kill:
            os._exit(1)
        return real(state, batches, num_targets, questions)

    patch.setattr(loop, "train_step", stepping)
    if stop:
        stop_after(patch, stop)
    try:
        return verbs.run(body).reason
    finally:
        patch.undo()


def test_c01_every_sample_is_trained_on_once_an_epoch_through_kills_and_other_worlds(straight: Path, tmp_path: Path):
    packing = started(straight / "runs" / "tuned").settings["packing"]["train"]
    whole = next(rows for rows in (1, 2, 3, 4, 5, 6) if packing["rows"] % rows == 0 and rows > 1)
    body = recipe(straight, "history", batch_tokens=whole * CONTEXT)
    body["checkpoint"]["every"] = 3
    body["machine"]["prefetch"] = 2
    with pytest.raises(RuntimeError, match="died without a word"):
        run_job(_life, 1, body, tmp_path, 5, 0)
    assert run_job(_life, 2, body, tmp_path, 0, 8) == ["stopped"] * 2
    with pytest.raises(RuntimeError, match="died without a word"):
        run_job(_life, 2, body, tmp_path, 11, 0)
    assert run_job(_life, 1, body, tmp_path, 0, 0) == ["finished"]
    run_dir = straight / "runs" / "history"
    verify(run_dir)
    assert started(run_dir).steps * whole == 2 * packing["rows"]
    wanted = [tuple(y for y, w in zip(ids[1:], targets[1:]) if w) for ids, targets in samples_of(run_dir)]
    assert ledger_of(tmp_path) == {sample: 2 * count for sample, count in Counter(wanted).items()}


def test_c45_a_run_of_epochs_resumes_to_the_same_bits_and_is_replayed(straight: Path):
    body = recipe(straight, "stopped")
    patch = pytest.MonkeyPatch()
    stop_after(patch, 7)
    assert verbs.run(body).reason == "stopped"
    patch.undo()
    run_dir = verbs.run(body).directory
    assert [r.data.step for r in read(run_dir) if r.kind == "resume"] == [7]
    a, b = (load_model(straight / "runs" / name / "models" / "tuned").state_dict() for name in ("stopped", "tuned"))
    assert same_bits(a, b)
    assert [s.loss for s in steps(run_dir).values()] == [s.loss for s in steps(straight / "runs" / "tuned").values()]
    again = verbs.replay(run_dir, 9, 12)
    assert again is not None and again.code == 0


def test_two_ranks_train_on_the_same_rows(straight: Path):
    def run_here(rank: int, world: int, body: dict[str, Any]) -> str:
        return verbs.run(body).reason

    body = recipe(straight, "two", sft={"weighting": "sample"})
    assert verbs.run(body | {"run": body["run"] | {"name": "one"}}).reason == "finished"
    assert run_job(run_here, 2, body) == ["finished"] * 2
    one, two = (steps(straight / "runs" / name) for name in ("one", "two"))
    assert [s.targets for s in one.values()] == [s.targets for s in two.values()]
    assert [s.loss for s in two.values()] == pytest.approx([s.loss for s in one.values()], rel=1e-5)


def test_it_goes_on_from_a_stage_and_from_a_directory(straight: Path):
    model = straight / "runs" / "tuned" / "models" / "tuned"
    body = recipe(straight, "more", start=str(model), epochs=0.5, gate={"kind": "heldout", "margin": 0.1})
    body.pop("model")
    run_dir = verbs.run(body).directory
    last = list(steps(straight / "runs" / "tuned").values())[-1].loss
    assert abs(steps(run_dir)[1].loss - last) < 0.5
    assert started(run_dir).steps == -(-started(run_dir).settings["packing"]["train"]["rows"] // 2 // 4)
    gate = next(r.data for r in read(run_dir) if r.kind == "gate")
    assert "the parent's" in gate.reason


def test_what_cannot_be_is_said_in_a_sentence(straight: Path, capsys: pytest.CaptureFixture[str]):
    long = {"lr": 1e-3, "schedule": {"kind": "wsd", "warmup": 500, "decay": 10}}
    file = write_recipe(straight, recipe(straight, "long", optim=long))
    truestep(capsys, "run", file).refused("stages.tuned.optim.schedule has warmup 500 and decay 10", "2 epochs of")
    file = write_recipe(straight, recipe(straight, "none", context=4, batch_tokens=32))
    truestep(capsys, "run", file).refused("truestep data inspect --stage")


def test_what_is_cut_or_left_out_is_said(straight: Path, capsys: pytest.CaptureFixture[str]):
    file = write_recipe(straight, recipe(straight, "cut", context=12, batch_tokens=48, epochs=0.2))
    said = " ".join(truestep(capsys, "run", file).out.split())
    report = started(straight / "runs" / "cut").settings["packing"]["train"]
    assert report["truncated"] > 0 and report["tokens_in"] == report["tokens_out"] + report["dropped_tokens"]
    assert f"{report['truncated']} truncated" in said
