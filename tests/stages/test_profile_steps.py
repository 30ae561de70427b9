"""machine.profile_steps in a whole run."""

from pathlib import Path

from tests import small_run
from tests.dist import run_job
from truestep.cli import verbs
from truestep.runlog.log import read


def _carry_out(rank, world, body):
    return verbs.run(body, ()).reason


def test_a_run_says_how_much_communication_is_exposed(tmp_path):
    body = small_run.with_machine(small_run.recipe(tmp_path, tokens=4 * 12 * 32), profile_steps=2)
    assert run_job(_carry_out, 2, body) == ["finished"] * 2
    run_dir = Path(tmp_path) / "runs" / "small"
    (profile,) = [record.data for record in read(run_dir) if record.kind == "profile"]
    assert (profile.stage, profile.step, profile.steps) == ("base", 3, 2)
    assert 0 < profile.exposed_s <= profile.communication_s <= profile.step_s
    assert profile.worst_exposed_s >= profile.exposed_s
    assert profile.worst_communication_s >= profile.communication_s
    assert profile.groups and "exposed communication" in (run_dir / "report.html").read_text()
