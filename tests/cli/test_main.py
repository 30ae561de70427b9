"""The command line as a program."""

import os
import subprocess
import sys
from pathlib import Path

RECIPE = """
run = { name = "own" }
data.own = { source = "own_source:Source" }
model = {}
machine = { microbatch_rows = 1, data_workers = 1 }

[[stages]]
name = "base"
data = "own"
context = 8
tokens = 8
batch_tokens = 8
gate = { kind = "none", reason = "nothing is trained" }
"""


def test_code_in_the_current_folder_is_found_as_under_python_m(tmp_path):
    (tmp_path / "own_source.py").write_text("class Source:\n    def documents(self):\n        raise SystemExit(7)\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    script = Path(sys.executable).parent / "truestep"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(script), "data", "build", "recipe.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr  # the code of the user ran
