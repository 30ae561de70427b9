"""Whole runs of kind = "distill": a student of its own learns from a teacher on the same mesh."""

import json
from pathlib import Path

import pytest

from tests import small_run
from tests.dist import run_job
from tests.stages.test_run import losses
from truestep.cli import verbs
from truestep.errors import UserError
from truestep.models.hf import read_section
from truestep.runlog.log import read

STUDENT = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
STEPS = 4
NO_GATE = {"kind": "none", "reason": "a test"}


def body(folder: Path, name: str, teacher: Path, distill=None, mesh=None, **changes):
    """A recipe of one stage that distils from a directory; by default into a smaller model."""
    found = small_run.recipe(folder, name, kind="distill", tokens=STEPS * 12 * 32)
    stage = found["stages"][0]
    stage["name"] = "student"
    stage["distill"] = {"teacher": str(teacher), "student": STUDENT} | (distill or {})
    stage |= {"evaluate": {"data": "heldout"}} | changes
    if stage.get("start", "init") != "init":
        stage["distill"].pop("student")
    stage["distill"] = {key: value for key, value in stage["distill"].items() if value is not None}
    del found["model"]
    return small_run.with_machine(found, mesh=mesh or {}, microbatch_rows=2)


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> tuple[Path, Path]:
    """(folder, the directory of a teacher that has seen some text)."""
    folder = tmp_path_factory.mktemp("distill")
    outcome = verbs.run(small_run.recipe(folder, "teacher", tokens=6 * 12 * 32))
    return folder, outcome.directory / "models" / "base"


def metrics_of(run_dir: Path, step: int) -> dict[str, float]:
    (found,) = [r.data for r in read(run_dir) if r.kind == "step" and r.data.step == step]
    return found.metrics


def _carry_out(rank, world, body, overrides=()):
    return verbs.run(body, overrides).reason


@pytest.fixture(scope="module")
def undisturbed(taught):
    folder, teacher = taught
    distill = {"temperature": 2.0, "hard": 0.25, "divergence": "js", "mix": 0.3}
    outcome = verbs.run(body(folder, "plain", teacher, distill))
    assert outcome.reason == "finished"
    return distill, outcome.directory


def test_the_student_is_a_model_of_its_own(undisturbed, taught):
    _, run_dir = undisturbed
    _, teacher = taught
    model = run_dir / "models" / "student"
    section = read_section(model)
    assert (section.hidden_size, section.num_heads) == (16, 2)
    said = json.loads((model / "manifest.json").read_text())
    assert said["lineage"]["teacher"] == str(teacher) and said["lineage"]["start"] == "init"
    assert said["gate"]["verdict"] == "pass" and not any("parent" in reason for reason in said["gate"]["reasons"])
    assert losses(run_dir)[STEPS] < losses(run_dir)[1]


@pytest.mark.parametrize(
    ("world", "mesh"),
    [(2, {"dp_replicate": 2, "dp_shard": 1}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"cp": 2})],
    ids=["ddp", "fsdp", "tp", "pp", "cp"],
)
def test_a_mesh_changes_nothing(undisturbed, taught, world, mesh):
    """Property 55's sums over any ranks; the teacher lies on the same mesh."""
    distill, plain = undisturbed
    folder, teacher = taught
    name = f"mesh-{'-'.join(mesh) or 'fsdp'}"
    assert set(run_job(_carry_out, world, body(folder, name, teacher, distill, mesh))) == {"finished"}
    run_dir = folder / "runs" / name
    assert losses(run_dir) == pytest.approx(losses(plain), rel=2e-5)
    for step in (1, STEPS):
        assert metrics_of(run_dir, step) == pytest.approx(metrics_of(plain, step), rel=1e-4)


@pytest.mark.parametrize("top_k", [0, 8])
def test_property_56_a_model_that_distils_itself_stands_still(taught, top_k):
    folder, teacher = taught
    optim = {"lr": 1e-3, "weight_decay": 0.0, "schedule": {"kind": "constant", "warmup": 0}}
    own = body(folder, f"itself-{top_k}", teacher, {"top_k": top_k}, start=str(teacher), optim=optim, gate=NO_GATE)
    run_dir = verbs.run(own).directory
    assert set(losses(run_dir).values()) == {0.0}
    assert metrics_of(run_dir, 1)["divergence"] == 0.0 and metrics_of(run_dir, 1)["nll"] > 1.0


@pytest.mark.parametrize(
    ("world", "mesh"), [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})], ids=["alone", "fsdp", "tp", "pp"]
)
def test_a_stored_teacher_gives_the_losses_of_an_online_one(taught, world, mesh):
    folder, teacher = taught
    distill = {"top_k": 8, "temperature": 1.5, "divergence": "reverse"}
    if not (folder / "runs" / "online").exists():
        verbs.run(body(folder, "online", teacher, distill))
    name = f"stored-{world}-{'-'.join(mesh)}"
    stored = body(folder, name, teacher, distill | {"logits": "stored"}, mesh)
    stored["run"]["dir"] = str(folder / name)  # a store of its own
    assert set(run_job(_carry_out, world, stored)) == {"finished"}
    made = sorted(path.name.rpartition("-")[0] for path in (folder / name / ".data").glob("teacher_*"))
    assert made == ["teacher_ids", "teacher_logp"]
    assert losses(folder / name / name) == pytest.approx(losses(folder / "runs" / "online"), rel=2e-5)


def test_property_55_vocabularies_are_compared_by_model_configurations(taught):
    """posttraining-anchors, section 4, property 55; trl#2215, #6252, ModelOpt#2489: 151,936 and 152,064 rows."""
    folder, teacher = taught
    student = STUDENT | {"vocab_size": 320}
    with pytest.raises(UserError, match=r"has logits for 257 ids, but the student has 320"):
        verbs.run(body(folder, "vocab", teacher, {"student": student}))


def test_property_55_a_teacher_sees_its_own_tokens(taught):
    """posttraining-anchors, section 4, property 55; trl#4562: a teacher with another tokenizer was scored silently."""
    folder, teacher = taught
    other = body(folder, "tokenizer", teacher, {"student": STUDENT | {"vocab_size": 257}})
    other["tokenizer"] = {"kind": "train-bpe", "vocab_size": 257, "data": ["train"]}
    with pytest.raises(UserError, match="has another tokenizer"):
        verbs.run(other)


@pytest.mark.parametrize(
    ("distill", "words"),
    [
        ({"teacher": "stage:nobody"}, "no earlier stage"),
        ({"teacher": "init"}, "fresh weights teach nothing"),
        ({"logits": "stored"}, "keeps the likeliest tokens only"),
        ({"mix": 0.2}, "mix"),
        ({"top_k": 300}, "there are 257 ids in all"),
        ({"student": STUDENT | {"num_heads": 3}}, "distill.student.num_heads"),
    ],
)
def test_bad_input_is_one_sentence(taught, distill, words):
    folder, teacher = taught
    with pytest.raises(UserError, match=words):
        verbs.run(body(folder, "bad", teacher, distill))
