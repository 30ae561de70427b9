"""Whole runs of kind = "reward_model": a score head learns which of two answers, or which step, is the better one."""

import json
from pathlib import Path

import pytest
import torch

from tests import small_post
from tests.dist import run_job
from tests.stages.test_run import losses
from truestep.cli import verbs
from truestep.errors import UserError
from truestep.models.decoder import Decoder
from truestep.models.load import load_model
from truestep.rollout.score import score
from truestep.runlog.log import read

STEPS = 12
LN_2 = 0.693147


def body(folder: Path, name: str, mesh=None, format="preference", **changes):
    found = small_post.recipe(folder, "reward_model", name, format=format, steps=STEPS, **changes)
    found["machine"]["mesh"] = mesh or {}
    return found


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    return [r.data.metrics for r in read(run_dir) if r.kind == "step"]


def _carry_out(rank, world, body):
    return verbs.run(body).reason


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("reward")
    outcome = verbs.run(body(folder, "plain"))
    assert outcome.reason == "finished"
    return folder, outcome.directory


def exactly(made):
    """In float64: behind a head of zeros gradients are tiny, and Adam makes rounding of them as large as any update."""
    made["machine"]["precision"] = "float64"
    return made


@pytest.fixture(scope="module")
def double(trained) -> None:
    assert verbs.run(exactly(body(trained[0], "double"))).reason == "finished"


def test_a_fresh_score_head_begins_at_ln_2_and_learns(trained):
    """posttraining-anchors, section 4, property 20: the head starts at 0."""
    _, run_dir = trained
    by_step = losses(run_dir)
    assert by_step[1] == pytest.approx(LN_2, abs=1e-6)
    first, last = steps_of(run_dir)[0], steps_of(run_dir)[-1]
    assert first == {"accuracy": 0.0, "margin": 0.0, "score": 0.0}
    assert last["accuracy"] > 0.8 and last["margin"] > 0 and by_step[STEPS] < 0.6


@pytest.mark.parametrize(
    ("world", "mesh"),
    [(2, {"dp_replicate": 2, "dp_shard": 1}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})],
    ids=["ddp", "fsdp", "tp", "pp"],
)
def test_property_22_a_mesh_changes_nothing(trained, double, world, mesh):
    """posttraining-anchors, section 4, property 22; NeMo-RL: 0.6035 / 0.6010 / 0.5864 / 0.6021 for TP 1 / 2 / 4 / 8."""
    folder, _ = trained
    name = f"mesh-{'-'.join(mesh) or 'fsdp'}"
    assert set(run_job(_carry_out, world, exactly(body(folder, name, mesh)))) == {"finished"}
    run_dir, plain = folder / "runs" / name, folder / "runs" / "double"
    assert losses(run_dir) == pytest.approx(losses(plain), rel=1e-9)
    for ours, theirs in zip(steps_of(run_dir), steps_of(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-9)


def test_the_directory_is_a_classifier_that_transformers_loads(trained):
    """Padded by its own tokenizer: the padding token is none that answers end with."""
    transformers = pytest.importorskip("transformers")
    _, run_dir = trained
    directory = run_dir / "models" / "tuned"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ours = load_model(directory).eval()
    assert isinstance(ours, Decoder) and ours.section.scores
    end = "<|im_end|>"
    assert tokenizer.pad_token_id == theirs.config.pad_token_id not in (tokenizer.eos_token_id, 258)
    texts = [f"<|im_start|>user\n{word}{end}\n<|im_start|>assistant\n{word[::-1]}{end}" for word in ("ab", "cdefg")]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = theirs(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].tolist()
    assert score(ours, [tokenizer(text)["input_ids"] for text in texts]) == pytest.approx(wanted, abs=2e-5)


def test_a_stage_of_text_cannot_start_from_a_reward_model(trained):
    folder, run_dir = trained
    other = small_post.recipe(folder, "sft", "text", start=str(run_dir / "models" / "tuned"))
    with pytest.raises(UserError, match="starts from a reward model"):
        verbs.run(other)


def test_a_reward_model_goes_on_from_a_reward_model(trained):
    folder, run_dir = trained
    again = verbs.run(body(folder, "again", start=str(run_dir / "models" / "tuned"), tokens=8 * 64))
    assert losses(again.directory)[1] < 0.6


def test_held_out_pairs_are_judged_by_the_loss_itself(trained):
    folder, _ = trained
    small_post.write_rows(folder / "other", "preference", small_post.made_up("preference", 20, seed=9))
    held = body(folder, "held", evaluate={"data": "held"}, gate={"kind": "heldout", "max_loss": 0.65})
    held["data"]["held"] = held["data"]["train"] | {"path": str(folder / "other" / "preference.jsonl")}
    run_dir = verbs.run(held).directory
    found = [r.data for r in read(run_dir) if r.kind == "eval"][-1]
    assert found.targets == 20 and found.loss < 0.65 and found.metrics["accuracy"] > 0.8
    assert found.bits_per_byte is None
    manifest = json.loads((run_dir / "models" / "tuned" / "manifest.json").read_text())
    assert manifest["gate"]["verdict"] == "pass"


def test_steps_have_labels_of_their_own(trained):
    folder, _ = trained
    rows = [
        {"prompt": row["prompt"], "steps": [row["chosen"], row["rejected"]], "labels": [True, False]}
        for row in small_post.made_up("preference")
    ]
    small_post.write_rows(folder / "rows", "steps", rows)
    run_dir = verbs.run(body(folder, "steps", format="steps", reward={"kind": "steps"})).directory
    assert losses(run_dir)[1] == pytest.approx(LN_2, abs=1e-6) and losses(run_dir)[STEPS] < 0.6
    assert steps_of(run_dir)[-1]["accuracy"] > 0.8
