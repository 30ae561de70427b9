"""A supervised run whose workers are killed: it goes on from memory, and keeps only what it is told to."""

import os
import subprocess
import sys

from tests.small_run import recipe, with_machine
from truestep.checkpoint.catalogue import list_committed
from truestep.checkpoint.marks import marks_of, standing
from truestep.recipe.dump import dump
from truestep.recipe.load import load
from truestep.runlog.log import read
from truestep.storage.local import LocalStore

PLAN = """
[[faults]]
kind = "kill"
step = 12
rank = 0
expect = "tolerated"

[[faults]]
kind = "kill"
step = 12
rank = 1
expect = "tolerated"
"""


def _run(folder, *command):
    made = with_machine(recipe(folder, tokens=32 * 12 * 32), processes=2) | {
        "checkpoint": {"every": 4, "every_time": "1h", "keep": 1, "memory": True, "drill_every": "0s"}
    }
    (folder / "recipe.toml").write_text(dump(load(made)))
    (folder / "plan.toml").write_text(PLAN)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TRUESTEP_HOSTS": "a,b"}
    arguments = [sys.executable, "-m", "truestep", *command]
    return subprocess.run(arguments, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


def test_a_run_whose_workers_were_all_killed_goes_on_from_memory(tmp_path):
    done = _run(tmp_path, "chaos", "recipe.toml", "--plan", "plan.toml")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    records = [record.data for record in read(tmp_path / "runs" / "small")]
    resumes = [data for data in records if type(data).__name__ == "Resume"]
    assert resumes and all(resume.places.keys() == {"memory"} and resume.places["memory"] > 0 for resume in resumes)
    assert "100 % from memory" in done.stdout
    deleted = [key for data in records if type(data).__name__ == "Retention" for key in data.deleted]
    assert deleted
    store = LocalStore(tmp_path / "runs" / "small" / "checkpoints" / "base")
    left = {each.key for each in list_committed(store)}
    assert "commits/000000000004-000001" not in left
    assert left == {resume.checkpoint for resume in resumes[-1:]} | {max(left)} and not left & set(deleted)
    assert standing(marks_of(store)[list_committed(store)[-1]]).verified == "scrub"
