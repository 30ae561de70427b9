"""Steps done again: bitwise on any number of processes, and where they part, it is said where."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import small_run
from tests.dist import run_job
from truestep.cli import verbs
from truestep.errors import UserError
from truestep.numerics.fingerprint import combined
from truestep.parallel.environment import place
from truestep.runlog.digests import read_digests
from truestep.stages import replay as replays
from truestep.stages.recorded import recorded
from truestep.train import loop
from truestep.train import step as steps
from truestep.train.digests import Digests

STEPS = 9


def exact(folder: Path, name: str = "small", **options) -> dict[str, Any]:
    """9 steps of 12 microbatches; checkpoints at 3, 6, 9, digests at 4 and 8."""
    body = small_run.recipe(folder, name=name, tokens=STEPS * 12 * 32, **options)
    return body | {
        "numerics": {"reduction": "exact"},
        "sentinel": {"sweep_every": 4},
        "checkpoint": {"every": 3, "every_time": "1h", "drill_every": "0s"},
    }


def carry_out(rank, world, body, overrides=(), patch=None):
    if patch is not None:
        patch(rank)
    return verbs.run(body, overrides).reason


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run on two processes."""
    folder = tmp_path_factory.mktemp("replayed")
    assert run_job(carry_out, 2, exact(folder)) == ["finished"] * 2
    return folder / "runs" / "small"


def again(run_dir: Path, first: int, last: int, *overrides: str, processes: int = 1) -> replays.Outcome:
    """The outcome in this process, or on forked ranks."""
    if processes == 1:
        found = _again(0, 1, run_dir, first, last, overrides)
    else:
        found = run_job(_again, processes, run_dir, first, last, overrides)[0]
    assert found is not None
    return found


def _again(rank, world, run_dir, first, last, overrides):
    plan = replays.plan_replay(run_dir, first, last, None, world, overrides)
    return replays.carry_out(run_dir, plan, place(os.environ) if world > 1 else None)


def everything(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("processes", [1, 3])
def test_bitwise_on_other_numbers_of_processes_and_nothing_is_written(run_dir, processes):
    before = everything(run_dir)
    outcome = again(run_dir, 5, 8, processes=processes)
    assert outcome.code == 0 and outcome.differences == [], outcome.sentence
    assert outcome.commit is not None and outcome.from_step == 3 and outcome.processes == processes
    assert [one.step for one in outcome.compared] == [4, 5, 6, 7, 8]
    assert [one.digests for one in outcome.compared] == [
        ("gradient", "state"), (), ("state",), (), ("gradient", "state")
    ]  # fmt: skip
    assert all(one.microbatches == 12 for one in outcome.compared)
    assert outcome.sentence.startswith("steps 4 to 8: every bit equal")
    assert everything(run_dir) == before


def test_from_first_weights_where_no_checkpoint_lies_before(run_dir):
    outcome = again(run_dir, 2, 3)
    assert outcome.commit is None and [one.step for one in outcome.compared] == [1, 2, 3] and outcome.code == 0


def test_steps_that_were_never_done_are_refused(run_dir):
    for first, last in ((0, 2), (5, 4), (8, 12)):
        with pytest.raises(UserError, match=r"--steps .*has steps 1 to 9 of stage 'base'"):
            again(run_dir, first, last)
    with pytest.raises(UserError, match=r"not a run directory"):
        again(run_dir / "log", 1, 2)


def test_c48_a_damaged_checkpoint_is_passed_over_loudly(run_dir):
    (block,) = run_dir.glob("checkpoints/base/steps/000000000006-*/rank-00001.bin")
    whole = block.read_bytes()
    try:
        block.write_bytes(whole[:100] + bytes([whole[100] ^ 4]) + whole[101:])
        outcome = again(run_dir, 7, 8)
        assert outcome.code == 0 and outcome.from_step == 3
        assert "passed over the checkpoint of step 6" in outcome.notes[0] and "damaged" in outcome.notes[0]
    finally:
        block.write_bytes(whole)


def test_another_way_to_compute_is_not_comparable_and_never_called_damage(run_dir):
    outcome = again(run_dir, 4, 5, "machine.microbatch_rows=2")
    assert outcome.code == 3
    assert "not comparable: machine.microbatch_rows: 1 → 2" in outcome.sentence
    outcome = again(run_dir, 4, 4, "machine.precision=bfloat16")
    assert outcome.code == 3 and 'precision: "float32" → "bfloat16"' in outcome.sentence


def test_fields_that_differ_but_change_no_bit_do_not_hide_equality(run_dir):
    outcome = again(run_dir, 4, 4, "machine.head_chunk_tokens=4096")
    assert outcome.differences and outcome.code == 0


# Faults: three things go wrong in a run on two processes, each behind another checkpoint.


def tamper(rank: int) -> None:
    """Rank 1 gets the loss of its second microbatch of step 5 wrong by the last bits, and later a bit of the reduced
    gradient of step 8; rank 0 a bit of Adam's second moment after step 12."""
    real_loss, real_reduced, real_step, calls = steps.head_loss, Digests.reduced, loop.train_step, [0]

    def head_loss(loss, batch, out):
        result, metrics = real_loss(loss, batch, out)
        calls[0] += 1
        wrong = rank == 1 and calls[0] == 6 + 4 * 6 + 2  # the first step is computed twice
        return result * (1 + 2e-7) if wrong else result, metrics

    def reduced(self, step):
        if step == 8 and rank == 1:
            self.gradients()["blocks.1.mlp.up.weight"].local.view(torch.int32)[0, 3] ^= 1 << 20
        real_reduced(self, step)

    def train_step(state, *rest):
        result = real_step(state, *rest)
        if state.step == 12 and rank == 0:
            state.tensors()["optim.blocks.0.mlp.up.weight.exp_avg_sq"].local.view(torch.int32)[0, 0] ^= 1 << 22
        return result

    steps.head_loss, Digests.reduced, loop.train_step = head_loss, reduced, train_step  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def tampered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tampered")
    body = exact(folder)
    body["stages"][0]["tokens"] = 12 * 12 * 32
    assert run_job(carry_out, 2, body, (), tamper) == ["finished"] * 2
    return folder / "runs" / "small"


def test_a_wrong_loss_is_located_to_step_microbatch_and_rank(tampered):
    outcome = again(tampered, 4, 6)
    assert outcome.code == 1 and outcome.parting is not None
    assert (outcome.parting.step, outcome.parting.microbatch, outcome.parting.rank) == (5, 3, 1)
    assert [bool(one.parting) for one in outcome.compared] == [False, True], "it ends there"
    assert "step 5, microbatch 3 (rank 1 of the run)" in outcome.sentence


def test_a_wrong_gradient_is_located_to_the_parameter(tampered):
    outcome = again(tampered, 7, 9)
    assert outcome.code == 1 and outcome.parting is not None
    assert (outcome.parting.step, outcome.parting.parameter) == (8, "blocks.1.mlp.up.weight")
    assert outcome.parting.kind == "gradient" and outcome.parting.microbatch is None
    assert "parts at step 8, first in parameter blocks.1.mlp.up.weight (gradient)" in outcome.sentence
    assert "loss" not in outcome.sentence


def test_a_wrong_state_is_located_to_the_tensor(tampered):
    outcome = again(tampered, 10, 12)
    assert outcome.code == 1 and outcome.parting is not None
    assert (outcome.parting.step, outcome.parting.kind) == (12, "state")
    assert outcome.parting.parameter == "optim.blocks.0.mlp.up.weight.exp_avg_sq" and outcome.parting.others == 0
    assert again(tampered, 10, 11).code == 0, "faults before the checkpoint are part of its state"


def test_skipped_steps_and_a_roll_back_that_leaves_data_out_come_out_again(tmp_path):
    """Whether an update is skipped is decided by the numbers alone; which rows are left out, the log says."""
    spikes = {"window": 8, "threshold": 0.5, "in_a_row": 2}
    body = exact(tmp_path)
    body["sentinel"]["spikes"] = spikes
    body["stages"][0]["tokens"] = 18 * 12 * 32
    assert run_job(carry_out, 2, body) == ["finished"] * 2
    run_dir = tmp_path / "runs" / "small"
    found = recorded(run_dir)
    assert found.steps[14].step.skipped and list(found.left_out) == [15]
    outcome = again(run_dir, 13, 18)
    assert outcome.code == 0 and outcome.from_step == 12 and len(outcome.compared) == 6, outcome.sentence


def test_rows_of_the_log_agree_with_its_records(run_dir):
    found = recorded(run_dir)
    rows = read_digests(run_dir, 1, "base", 4)
    assert combined(rows["state"], rows["state"].values()) == found.steps[4].state
    assert found.steps[9].attempt.mesh.dp_shard == 2 and found.steps[9].attempt.bits["threads"] == 1
