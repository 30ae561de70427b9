"""The recipe needs no torch, and little else: every verb imports it."""

import json
import subprocess
import sys

_SCRIPT = """
import json, pkgutil, sys
sys.modules["torch"] = None
import truestep.recipe
for module in pkgutil.iter_modules(truestep.recipe.__path__):
    __import__(f"truestep.recipe.{module.name}")
recipe_needs = {name.split(".")[0] for name in sys.modules}
import truestep.cli.check, truestep.cli.show
from truestep.recipe.load import load, dump
load(dump(load(json.loads(sys.argv[1]))))
print(json.dumps(sorted(recipe_needs)))
"""


def test_recipe_check_and_show_without_torch():
    from tests.recipe.small import small

    done = subprocess.run([sys.executable, "-c", _SCRIPT, json.dumps(small())], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"numpy", "rich", "typer", "pyarrow", "tokenizers", "huggingface_hub", "obstore", "matplotlib"}
