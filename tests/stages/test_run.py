"""Whole runs, in this process and on several ranks: what they leave, how they go on, what they refuse."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import small_run
from tests.dist import run_job
from truestep.cli import verbs
from truestep.runlog.log import read, verify
from truestep.runlog.metrics import read_metrics


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step; a step that was done again counts as it was done last."""
    return {r.data.step: r.data.loss for r in read(run_dir) if r.kind == "step"}


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "models" / "base" / "model.safetensors")


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def manifest(run_dir: Path) -> dict:
    return json.loads((run_dir / "models" / "base" / "manifest.json").read_text())


def _carry_out(rank, world, body, overrides=()):
    return verbs.run(body, overrides).reason


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The reference: one process, no interruption."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome = verbs.run(small_run.recipe(folder))
    assert outcome.reason == "finished"
    return folder, outcome.directory


def test_a_run_leaves_model_card_log_and_report(undisturbed):
    _, run_dir = undisturbed
    model = run_dir / "models" / "base"
    for file in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
        "card.json",
        "card.md",
        "manifest.json",
    ):
        assert (model / file).exists(), file
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")
    verify(run_dir)
    kinds = [r.kind for r in read(run_dir)]
    for kind in ("attempt_start", "data", "stage_start", "step", "eval", "save", "model", "gate", "attempt_end"):
        assert kind in kinds, kind
    assert kinds.count("step") == 20 and kinds.count("eval") == 3
    assert manifest(run_dir)["gate"]["verdict"] == "pass"
    by_step = losses(run_dir)
    assert by_step[20] < by_step[1]


def test_every_shard_logs_every_microbatch(undisturbed):
    _, run_dir = undisturbed
    table = read_metrics(run_dir, "base").to_pydict()
    assert len(table["step"]) == 20 * 12
    by_step = losses(run_dir)
    targets = {r.data.step: r.data.targets for r in read(run_dir) if r.kind == "step"}
    for step in range(1, 21):
        rows = [i for i, s in enumerate(table["step"]) if s == step]
        assert sum(table["weight"][i] for i in rows) == targets[step]
        assert sum(table["loss_sum"][i] for i in rows) / targets[step] == pytest.approx(by_step[step], rel=1e-6)
        assert all(table["grad_norm"][i] > 0 for i in rows)


def stop_after(monkeypatch, step: int):
    """Ask for a polite stop once `step` steps were done, as Ctrl-C would."""
    from truestep.train import loop

    real = loop.train_step

    def stepping(state, batches, num_targets, questions):
        asked = [1.0 if state.step + 1 >= step else questions[0], *questions[1:]]
        return real(state, batches, num_targets, asked)

    monkeypatch.setattr(loop, "train_step", stepping)


def _stopped(rank, world, body, step):
    patch = pytest.MonkeyPatch()
    stop_after(patch, step)
    reason = verbs.run(body).reason
    patch.undo()
    return reason


def test_c45_resume_on_the_same_layout_is_bitwise_and_so_is_the_second(undisturbed, tmp_path, monkeypatch):
    folder, reference = undisturbed
    body = small_run.recipe(folder, name="interrupted")
    for step in (8, 13):
        assert _stopped(0, 1, body, step) == "stopped"
    outcome = verbs.run(body)
    assert outcome.reason == "finished"
    assert losses(outcome.directory) == losses(reference)
    assert same_bits(weights(outcome.directory), weights(reference))
    assert manifest(outcome.directory)["weights"] == manifest(reference)["weights"]
    assert [r.data.step for r in read(outcome.directory) if r.kind == "resume"] == [8, 13]


@pytest.mark.parametrize("precision", ["float32"])
def test_c47_resume_on_other_world_sizes_takes_the_same_rows(undisturbed, precision):
    """2 ranks, then 3, then 1, then 4: state bitwise, data order identical, losses equal."""
    folder, reference = undisturbed
    body = small_run.recipe(folder, name="moving")
    for world, step in ((2, 6), (3, 11), (1, 15)):
        assert run_job(_stopped, world, body, step) == ["stopped"] * world
    assert run_job(_carry_out, 4, body) == ["finished"] * 4
    run_dir = folder / "runs" / "moving"
    assert losses(run_dir) == pytest.approx(losses(reference), rel=1e-5)
    a, b = weights(run_dir), weights(reference)
    assert all(torch.allclose(a[name], b[name], rtol=1e-3, atol=1e-5) for name in b)
    targets = lambda d: {r.data.step: r.data.targets for r in read(d) if r.kind == "step"}  # noqa: E731
    assert targets(run_dir) == targets(reference)


def test_same_command_after_the_end_does_nothing_again(undisturbed):
    folder, run_dir = undisturbed
    before = len(losses(run_dir)), manifest(run_dir)
    outcome = verbs.run(small_run.recipe(folder))
    assert outcome.reason == "finished" and (len(losses(run_dir)), manifest(run_dir)) == before


def test_changed_what_is_refused_with_the_field_named_and_changed_where_is_welcome(undisturbed):
    folder, run_dir = undisturbed
    before = sorted(p for p in run_dir.rglob("*"))
    body = small_run.recipe(folder)
    with pytest.raises(verbs.UserError, match=r"stages\.base\.optim\.lr.*0\.003.*0\.004"):
        verbs.run(body, ["stages.base.optim.lr=0.004"])
    assert sorted(p for p in run_dir.rglob("*")) == before
    assert verbs.run(body, ["machine.prefetch=0", "checkpoint.every=3"]).reason == "finished"


def test_gate_that_fails_ends_with_code_1(tmp_path):
    body = small_run.recipe(
        tmp_path,
        tokens=12 * 32,
        gate={"kind": "heldout", "max_loss": 0.5},
        optim={"lr": 1e-3, "schedule": {"kind": "constant", "warmup": 0}},
    )
    outcome = verbs.run(body)
    assert outcome.reason == "gate" and outcome.exit_code == 1
    assert manifest(outcome.directory)["gate"]["verdict"] == "fail"


def test_c48_required_and_never(tmp_path):
    body = small_run.recipe(tmp_path)
    with pytest.raises(verbs.UserError, match=r"required.*no checkpoint"):
        verbs.run(body, ["run.resume=required"])
    assert _stopped(0, 1, body, 6) == "stopped"
    with pytest.raises(verbs.UserError, match=r"never.*step 6"):
        verbs.run(body, ["run.resume=never"])
    assert verbs.run(body, ["run.resume=required"]).reason == "finished"


def two_stages(folder: Path, name: str, start: str = "stage:base", **gate) -> dict:
    body = small_run.recipe(folder, name=name, tokens=6 * 12 * 32)
    second = body["stages"][0] | {"name": "more", "start": start, "gate": {"kind": "heldout"} | gate}
    return body | {"stages": [body["stages"][0], second]}


def test_second_stage_starts_from_the_first_and_is_held_against_it(tmp_path):
    outcome = verbs.run(two_stages(tmp_path, "two", margin=0.5))
    assert outcome.reason == "finished" and set(outcome.models) == {"base", "more"}
    verdict = next(r.data for r in read(outcome.directory) if r.kind == "gate" and r.data.stage == "more")
    assert "the parent's" in verdict.reason and verdict.verdict == "pass"
    first = next(r.data.loss for r in read(outcome.directory) if r.kind == "step" and r.data.stage == "more")
    last = [r.data.loss for r in read(outcome.directory) if r.kind == "step" and r.data.stage == "base"][-1]
    assert abs(first - last) < 0.5  # it went on from trained weights, not from fresh ones (5.5)


def test_stage_that_undoes_the_first_does_not_pass(tmp_path):
    body = two_stages(tmp_path, "undone")
    body["stages"][1]["optim"] = {"lr": 3.0, "clip_norm": 0.0, "schedule": {"kind": "constant", "warmup": 0}}
    outcome = verbs.run(body)
    assert outcome.reason == "gate"
    assert [r.data.verdict for r in read(outcome.directory) if r.kind == "gate"] == ["pass", "fail"]


def test_start_from_a_model_directory_is_that_model(undisturbed, tmp_path):
    _, run_dir = undisturbed
    body = small_run.recipe(tmp_path, tokens=12 * 32, start=str(run_dir / "models" / "base"))
    body.pop("model")
    body["stages"][0]["optim"] = {"lr": 1e-9, "schedule": {"kind": "constant", "warmup": 0}}
    body["stages"][0]["gate"] = {"kind": "heldout", "margin": 1e-4}
    outcome = verbs.run(body)
    assert outcome.reason == "finished"
    start = next(r.data for r in read(outcome.directory) if r.kind == "stage_start")
    assert start.start == str(run_dir / "models" / "base")
    a, b = weights(outcome.directory), weights(run_dir)
    assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in b)


def test_ungated_stage_says_so_on_its_card(tmp_path):
    body = small_run.recipe(tmp_path, tokens=12 * 32, gate={"kind": "none", "reason": "a trial"}, evaluate=None)
    body["stages"][0].pop("evaluate")
    body["data"].pop("heldout")
    body["stages"][0]["optim"] = {"lr": 1e-3, "schedule": {"kind": "constant", "warmup": 0}}
    outcome = verbs.run(body)
    assert outcome.reason == "finished"
    assert "UNGATED" in (outcome.models["base"] / "card.md").read_text()


@pytest.mark.s3
def test_checkpoints_on_a_real_s3_server_and_resume_from_there(undisturbed, seaweed):
    folder, reference = undisturbed
    body = small_run.recipe(folder, name="on-s3")
    body["checkpoint"] |= {"url": f"{seaweed.url}/runs", "storage_options": seaweed.options}
    assert _stopped(0, 1, body, 8) == "stopped"
    outcome = verbs.run(body)
    assert outcome.reason == "finished"
    assert not (outcome.directory / "checkpoints").exists()
    assert [r.data.step for r in read(outcome.directory) if r.kind == "resume"] == [8]
    assert same_bits(weights(outcome.directory), weights(reference))


def test_export_of_an_unfinished_run_is_its_newest_checkpoint(undisturbed, tmp_path):
    folder, _ = undisturbed
    body = small_run.recipe(folder, name="exported")
    assert _stopped(0, 1, body, 9) == "stopped"
    target = verbs.export(folder / "runs" / "exported", tmp_path / "model")
    texts = verbs.sample(target, ["the "], max_new_tokens=4, temperature=0.0)
    assert len(texts) == 1
    from truestep.checkpoint.load import load_newest
    from truestep.models.load import load_model
    from truestep.storage.store import open_store

    model = load_model(target)
    saved = {f"model.{name}": torch.empty_like(p) for name, p in model.named_parameters()}
    loaded = load_newest(open_store(str(folder / "runs" / "exported" / "checkpoints" / "base")), saved, strict=False)
    assert loaded is not None and loaded.step == 9
    assert all(torch.equal(saved[f"model.{name}"], p) for name, p in model.named_parameters())


def test_resume_with_other_bits_says_which(undisturbed):
    folder, _ = undisturbed
    body = small_run.recipe(folder, name="bits")
    assert _stopped(0, 1, body, 4) == "stopped"
    assert verbs.run(body, ["machine.microbatch_rows=2"]).reason == "finished"
    resume = next(r.data for r in read(folder / "runs" / "bits") if r.kind == "resume")
    assert resume.changed == ["machine.microbatch_rows: 1 → 2"]


def test_batch_ramp_reads_every_row_once(tmp_path):
    ramp = [{"after": 4 * 12 * 32, "batch_tokens": 24 * 32}, {"after": 10 * 12 * 32, "batch_tokens": 36 * 32}]
    body = small_run.recipe(tmp_path, ramp=ramp)
    outcome = verbs.run(body)
    steps = [r.data for r in read(outcome.directory) if r.kind == "step"]
    assert [s.tokens // (12 * 32) for s in steps] == [1] * 4 + [2] * 3 + [3] * 4
    alone = small_run.recipe(tmp_path, name="flat", tokens=22 * 12 * 32)
    flat = [r.data.targets for r in read(verbs.run(alone).directory) if r.kind == "step"]
    assert sum(s.targets for s in steps) == sum(flat)  # the same 22 x 12 rows


def test_edited_input_reaches_a_new_run_and_not_one_that_has_begun(tmp_path):
    body = small_run.recipe(tmp_path, name="begun")
    assert _stopped(0, 1, body, 6) == "stopped"
    before = [r.data.fingerprint for r in read(tmp_path / "runs" / "begun") if r.kind == "data"]
    file = tmp_path / "text" / "000.txt"
    file.write_text(file.read_text().upper())  # the same size and another text
    assert verbs.run(body).reason == "finished"
    assert [r.data.fingerprint for r in read(tmp_path / "runs" / "begun") if r.kind == "data"] == before
    fresh = verbs.run(small_run.recipe(tmp_path, name="fresh"))
    assert [r.data.fingerprint for r in read(fresh.directory) if r.kind == "data"] != before
