"""The house: imports point to lower floors, parts on one floor do not import each other, some do without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import truestep

ROOT = Path(truestep.__file__).parent
FLOORS = [
    {"recipe", "runlog", "storage", "factors"},
    {"numerics", "ledger", "plan"},
    {"models", "parallel", "optim", "losses", "checkpoint", "data", "sentinel", "adapters", "quant"},
    {"train", "rollout"},
    {"gate"},
    {"stages"},
    {"elastic", "dashboard"},
    {"cli"},
]
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}
GROUND = {"errors", "files", "imports"}
"""Modules at the root that every floor may import; they import nothing of ours but each other."""
TORCH_FREE = ["recipe", "runlog", "storage", "factors", "ledger", "plan", "elastic", "dashboard", "gate", "cli"]
TORCH_FREE_MODULES = [
    "truestep.checkpoint.catalogue",
    "truestep.checkpoint.manifest",
    "truestep.checkpoint.marks",
    "truestep.checkpoint.of_run",
    "truestep.checkpoint.places",
    "truestep.checkpoint.sweep",
    "truestep.checkpoint.upkeep",
    "truestep.checkpoint.verify",
    "truestep.data.build",
    "truestep.data.tokenizer",
    "truestep.data.store",
    "truestep.parallel.environment",
    "truestep.parallel.mesh",
]


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Every module of ours that a file imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            if node.module and node.module.split(".")[0] == "truestep":
                found += [node.module if "." in node.module else f"truestep.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "truestep"]
    return found


FILES = sorted(ROOT.rglob("*.py"))


def test_every_part_has_a_floor():
    parts = {part_of(path) for path in FILES} - GROUND - {"__init__", "__main__"}
    assert parts <= FLOOR.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_to_lower_floors(path):
    mine = part_of(path)
    if mine in ("__init__", "__main__"):
        return
    for module in imports(path):
        theirs = module.split(".")[1]
        if mine in GROUND:
            assert theirs in GROUND, f"{path} imports {module}"
        elif theirs not in GROUND and theirs != mine:
            assert FLOOR[theirs] < FLOOR[mine], f"{path} ({mine}) imports {module}"


def test_packages_are_empty_at_the_door():
    for path in FILES:
        if path.name == "__init__.py" and path.parent != ROOT:
            assert path.read_text() == "", path


BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_torch_free_parts_import_without_torch():
    names = list(TORCH_FREE_MODULES)
    for part in TORCH_FREE:
        for path in sorted((ROOT / part).rglob("*.py")):
            names.append(
                ".".join(("truestep", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
            )
    done = subprocess.run([sys.executable, "-c", BLOCK, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_models_and_parallel_never_name_each_other():
    for part, other in (("models", "parallel"), ("parallel", "models")):
        for path in (ROOT / part).rglob("*.py"):
            assert not any(module.split(".")[1] == other for module in imports(path)), path
