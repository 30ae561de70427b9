"""What is chosen by measurement is measured once and used again."""

import json

from tests import small_run, tiny
from truestep.cli import verbs
from truestep.stages.measure import step_seconds


def test_a_step_is_measured_in_both_dtypes():
    found = step_seconds(tiny.section(), 16, rounds=2)
    assert set(found) == {"float32", "bfloat16"} and all(seconds > 0 for seconds in found.values())


def test_measured_once_recorded_and_used_on_resume(tmp_path):
    body = small_run.with_machine(small_run.recipe(tmp_path, tokens=3 * 12 * 32), precision="auto")
    body["stages"][0]["optim"] = {"lr": 1e-3, "schedule": {"kind": "constant", "warmup": 0}}
    run_dir = verbs.run(body).directory
    first = (run_dir / "measured.json").read_bytes()
    (found,) = [value for name, value in json.loads(first).items() if name.startswith("precision")]
    assert found["chosen"] in ("float32", "bfloat16") and found["seconds"]
    (run_dir / "models" / "base" / "card.json").unlink()  # the stage is to be finished again
    verbs.run(body)
    assert (run_dir / "measured.json").read_bytes() == first
