"""Whole runs in which bits flip: the fault is in the log, the run goes back to a checkpoint of before, and its weights
are those of a run in which nothing happened."""

import json
from pathlib import Path

import pytest

from tests import small_run
from tests.dist import run_job
from tests.stages.test_run import same_bits, weights
from truestep.cli import verbs
from truestep.runlog.log import read
from truestep.sentinel.inject import VARIABLE
from truestep.stages.recorded import recorded

WATCHFUL = {"digest_share": 1.0, "replay_share": 1.0, "sweep_every": 1}


def _carry_out(rank, world, body):
    return verbs.run(body).reason


def faults(run_dir: Path) -> list:
    """But slow links, which a busy machine has."""
    return [r.data for r in read(run_dir) if r.kind == "fault" and r.data.kind != "link"]


def train(folder: Path, name: str, world: int, mesh: dict, monkeypatch, *flips: dict) -> Path:
    """The directory of a run, with the flips at step 13; it saves every five steps."""
    body = small_run.recipe(folder, name, tokens=15 * 12 * 32) | {"sentinel": WATCHFUL}
    body = small_run.with_machine(body, mesh=mesh, microbatch_rows=2)
    if flips:
        plan = folder / f"{name}.json"
        plan.write_text(json.dumps({"faults": [{"step": 13} | flip for flip in flips]}))
        monkeypatch.setenv(VARIABLE, str(plan))
    reasons = run_job(_carry_out, world, body)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert set(reasons) == {"finished"}
    return folder / "runs" / name


@pytest.mark.parametrize(
    ("world", "mesh", "flip", "kind", "back_to"),
    [
        (2, {"dp_replicate": 2, "dp_shard": 1}, {"site": "state", "tensor": "embed.weight", "bit": 3}, "state", 10),
        (3, {}, {"site": "gradient", "tensor": 2, "element": 5, "bit": 2}, "replay", 10),
    ],
)
def test_a_flipped_bit_leaves_no_trace_in_the_weights(tmp_path, monkeypatch, world, mesh, flip, kind, back_to):
    plain = train(tmp_path, "plain", world, mesh, monkeypatch)
    hit = train(tmp_path, "hit", world, mesh, monkeypatch, flip | {"rank": 1})
    assert not faults(plain) and not [r for r in read(plain) if r.kind == "decision"]
    (fault,) = faults(hit)
    assert (fault.kind, fault.step, fault.rank, fault.named, fault.stage) == (kind, 13, 1, True, "base")
    (decision,) = [r.data for r in read(hit) if r.kind == "decision"]
    assert (decision.action, decision.to_step, decision.left_out) == ("roll back", back_to, [])
    assert same_bits(weights(hit), weights(plain))
    assert digests(hit) == digests(plain) and set(digests(plain)) == set(range(1, 16))


def digests(run_dir: Path) -> dict[int, tuple[str | None, str | None]]:
    """Of gradient and state, after each step that the run stands on and that has them."""
    done = recorded(run_dir).steps.items()
    return {step: (one.gradient, one.state) for step, one in done if one.state is not None}
