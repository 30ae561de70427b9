"""Whole runs of kind = "preference": a tiny chat model learns which of two answers is preferred."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import small_post
from tests.dist import run_job
from tests.stages.test_run import losses
from truestep.cli import verbs
from truestep.data.columns import VALUES
from truestep.errors import UserError
from truestep.models.hf import read_section
from truestep.parallel.mesh import resolve
from truestep.recipe.load import load
from truestep.runlog.log import read
from truestep.stages.dry_run_recipe import Case, dry_run

STEPS = 12
LN_2 = math.log(2)


def body(folder: Path, name: str, mesh: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    found = small_post.recipe(folder, "preference", name, steps=changes.pop("steps", STEPS), **changes)
    found["machine"]["mesh"] = mesh or {}
    return found


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    return [r.data.metrics for r in read(run_dir) if r.kind == "step"]


def _carry_out(rank: int, world: int, body: dict[str, Any]) -> str:
    return verbs.run(body).reason


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("preference")
    outcome = verbs.run(body(folder, "plain"))
    assert outcome.reason == "finished"
    return folder, outcome.directory


def test_a_stage_learns_what_is_preferred(trained):
    _, run_dir = trained
    first, last = steps_of(run_dir)[0], steps_of(run_dir)[-1]
    assert last["accuracy"] > 0.9 and last["margin"] > 0.05 and losses(run_dir)[STEPS] < 0.65
    assert last["margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"], rel=1e-9)
    assert last["kl"] > first["kl"] >= 0 and last["undefined"] == 0


ALWAYS = ("lora-online",)
"""What every test run tries of the following; the rest is slow."""
LN_2_RUNS: dict[str, dict[str, Any]] = {
    "precomputed": {},
    "online": {"preference": {"reference": "online"}},
    "lora": {"lora": {"rank": 4}},
    "lora-online": {"lora": {"rank": 4}, "preference": {"reference": "online"}},
    "robust": {"preference": {"kind": "robust", "label_smoothing": 0.2}},
    "length-normalised": {"preference": {"kind": "length-normalised"}},
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in ALWAYS else pytest.mark.slow) for c in LN_2_RUNS])
def test_property_11_the_first_step_loses_ln_2(trained, case):
    """posttraining-anchors, section 4, property 11: 0.693147 (NeMo-RL asserts 0.69314 to 0.69316), with adapters and
    with a stored reference too."""
    folder, _ = trained
    run_dir = verbs.run(body(folder, case, steps=2, **LN_2_RUNS[case])).directory
    assert losses(run_dir)[1] == pytest.approx(LN_2, abs=2e-7) and losses(run_dir)[2] != losses(run_dir)[1]
    metrics = steps_of(run_dir)[0]
    rewards = [metrics[name] for name in ("reward_chosen", "reward_rejected", "margin", "kl")]
    assert rewards == pytest.approx([0.0] * 4, abs=2e-6)


@pytest.mark.slow
def test_both_references_are_the_same(trained):
    folder, plain = trained
    online = verbs.run(body(folder, "online-too", preference={"reference": "online"})).directory
    assert losses(online) == pytest.approx(losses(plain), rel=1e-5)
    assert steps_of(online)[-1] == pytest.approx(steps_of(plain)[-1], rel=1e-3, abs=1e-6)


MESHES = {
    "ddp": {"dp_replicate": 2, "dp_shard": 1},
    "fsdp": {},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "cp": {"cp": 2},
}


@pytest.mark.parametrize(
    ("mesh", "reference"),
    [
        pytest.param(mesh, reference, marks=() if (mesh, reference) == ("cp", "precomputed") else pytest.mark.slow)
        for mesh in MESHES
        for reference in ("precomputed", "online")
    ],
)
def test_a_mesh_changes_nothing(trained, mesh, reference):
    """The stored reference is made anew on each mesh."""
    folder, plain = trained
    name = f"{reference}-{mesh}"
    for column in (folder / "runs" / ".data").glob("reference-*"):
        shutil.rmtree(column)
    changes = {"preference": {"reference": reference}}
    assert set(run_job(_carry_out, 2, body(folder, name, MESHES[mesh], steps=4, **changes))) == {"finished"}
    run_dir = folder / "runs" / name
    wanted = {step: loss for step, loss in losses(plain).items() if step <= 4}
    assert losses(run_dir) == pytest.approx(wanted, rel=1e-5)
    for ours, theirs in zip(steps_of(run_dir), steps_of(plain)):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "tp", "pp"])
def test_the_trunk_without_its_adapters_is_the_reference_on_every_mesh(trained, mesh):
    folder, _ = trained
    lora = {"lora": {"rank": 4}, "preference": {"reference": "online"}, "steps": 4}
    name = f"lora-{mesh}"
    plain = folder / "runs" / "lora-plain"
    if not plain.exists():
        verbs.run(body(folder, "lora-plain", **lora))
    assert set(run_job(_carry_out, 2, body(folder, name, MESHES[mesh], **lora))) == {"finished"}
    assert losses(folder / "runs" / name) == pytest.approx(losses(plain), rel=1e-5)


def test_a_stored_reference_is_used_again_and_verified(trained):
    """By its name, which is a digest of the model and the data; a changed bit is noticed."""
    folder, plain = trained
    own = body(folder, "again", steps=2)
    verbs.run(own | {"run": own["run"] | {"name": "one"}})
    columns = {path: (path / VALUES).stat().st_mtime_ns for path in (folder / "runs" / ".data").glob("reference-*")}
    outcome = verbs.run(own | {"run": own["run"] | {"name": "two"}})
    after = {path: (path / VALUES).stat().st_mtime_ns for path in (folder / "runs" / ".data").glob("reference-*")}
    assert after == columns
    assert losses(outcome.directory) == {step: loss for step, loss in losses(plain).items() if step <= 2}
    assert not [r for r in read(outcome.directory) if r.kind == "phase" and "reference" in r.data.name]
    for path in columns:
        file = path / VALUES
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.chmod(0o644)
        file.write_bytes(data)
    with pytest.raises(UserError, match="reference-"):
        verbs.run(own | {"run": own["run"] | {"name": "three"}})
    for path in columns:
        shutil.rmtree(path)


@pytest.mark.slow
def test_another_start_has_another_reference(trained):
    folder, _ = trained
    small_post.save_base(folder / "other", seed=5)
    before = set((folder / "runs" / ".data").glob("reference-*"))
    run_dir = verbs.run(body(folder, "other-start", start=str(folder / "other"), steps=2)).directory
    assert set((folder / "runs" / ".data").glob("reference-*")) - before
    assert losses(run_dir)[1] == pytest.approx(LN_2, abs=2e-7)


def test_a_reference_that_is_not_a_number_is_one_sentence(trained):
    from safetensors.torch import load_file, save_file

    folder, _ = trained
    small_post.save_base(folder / "broken")
    (file,) = (folder / "broken").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][:] = 3e38  # finite, and its products are not
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match="the reference of row 0 is not a number; check the model"):
        verbs.run(body(folder, "nan", start=str(folder / "broken")))


def test_held_out_pairs_are_judged_by_the_loss_itself(trained):
    folder, _ = trained
    small_post.write_rows(folder / "held", "preference", small_post.made_up("preference", 20, seed=9))
    gated = {"evaluate": {"data": "held"}, "gate": {"kind": "heldout", "max_loss": 0.69}}
    own = body(folder, "held", **gated)
    own["data"]["held"] = own["data"]["train"] | {"path": str(folder / "held" / "preference.jsonl")}
    run_dir = verbs.run(own).directory
    found = [r.data for r in read(run_dir) if r.kind == "eval"][-1]
    assert found.targets == 20 and found.loss < LN_2 and found.bits_per_byte is None
    assert found.metrics["accuracy"] > 0.9 and found.metrics["margin"] > 0
    manifest = json.loads((run_dir / "models" / "tuned" / "manifest.json").read_text())
    assert manifest["gate"]["verdict"] == "pass"
    assert any("0.693147" in reason for reason in manifest["gate"]["reasons"]), manifest["gate"]  # of the start


def test_kto_learns_from_single_answers(trained):
    folder, _ = trained
    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for number, row in enumerate(small_post.made_up("preference"))
        for side in (("chosen", "rejected") if number % 3 else ("chosen",))
    ]
    small_post.write_rows(folder / "rows", "labels", rows)
    found = {}
    for name, machine in {"kto": {}, "kto-4-rows": {"microbatch_rows": 4}}.items():
        own = body(folder, name, format="labels", preference={"kind": "kto", "beta": 0.5, "kl_pairs": 16})
        own["machine"] |= machine
        found[name] = verbs.run(own).directory
    steps, by_step = steps_of(found["kto"]), losses(found["kto"])
    assert by_step[1] == pytest.approx(0.5, abs=1e-6) and by_step[STEPS] < 0.45
    assert steps[0]["reference_point"] == pytest.approx(0.0, abs=1e-6)
    assert max(step["reference_point"] for step in steps) > 0 and steps[-1]["margin"] > 1
    other = found["kto-4-rows"]  # no microbatch has a reference point of its own
    assert losses(other) == pytest.approx(by_step, rel=1e-5)
    for ours, theirs in zip(steps_of(other), steps, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "tp", "pp", "cp"])
def test_a_mesh_changes_no_reference_point(trained, mesh):
    folder, _ = trained
    kto = {"format": "labels", "preference": {"kind": "kto", "beta": 0.5, "kl_pairs": 16}, "steps": 4}
    plain, name = folder / "runs" / "kto-plain", f"kto-{mesh}"
    if not plain.exists():
        verbs.run(body(folder, "kto-plain", **kto))
    assert set(run_job(_carry_out, 2, body(folder, name, MESHES[mesh], **kto))) == {"finished"}
    assert losses(folder / "runs" / name) == pytest.approx(losses(plain), rel=1e-5)
    assert [step["reference_point"] for step in steps_of(folder / "runs" / name)] == pytest.approx(
        [step["reference_point"] for step in steps_of(plain)], rel=1e-3, abs=1e-6
    )


def test_a_dry_run_traces_the_step(trained):
    folder, _ = trained
    recipe = load(body(folder, "traced"))
    degrees = resolve(recipe.machine.mesh, 1, None)
    case = Case(read_section(folder / "base"), recipe.stages[0], recipe.machine, degrees, "float32", "cpu")
    assert dry_run(case, [0])[0].cost.peak_bytes > 0


def test_property_14_dropout_is_refused(trained):
    """posttraining-anchors, section 4, property 14 (trl#744, #2042): no log-probability is drawn."""
    folder, _ = trained
    with pytest.raises(UserError, match="compared without dropout"):
        verbs.run(body(folder, "dropped", lora={"rank": 4, "dropout": 0.1}))


def test_fresh_weights_are_no_reference(trained):
    folder, _ = trained
    with pytest.raises(UserError, match="preferences are measured against the start"):
        verbs.run(body(folder, "fresh", start="init") | {"model": small_post.MODEL})
