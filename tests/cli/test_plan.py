"""`truestep plan` by formulas, and what `truestep check` says of a mesh."""

import json

import pytest

from tests.recipe.small import small
from tests.refusals import truestep, write_recipe

MESH = ["--set", "machine.mesh={pp=2, tp=2, dp_shard=2}"]


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path, small(machine={"processes": 8}))


def test_check_says_what_a_mesh_costs_each_rank(capsys, recipe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    said = truestep(capsys, "check", recipe, *MESH).out
    for words in (
        "8 processes: pp 2, dp_shard 2, tp 2; 4 microbatches",
        "in flight",
        "hidden states",
        "(P-1)(F+B)",
    ):
        assert words in said
    assert "bubble      20.0% of a step" in said and "arXiv 1910.02054" in said and "The mesh is for" not in said


def test_plan_as_json(capsys, recipe):
    said = json.loads(truestep(capsys, "plan", recipe, *MESH, "--json", "--set", "stages.base.batch_tokens=1024").out)
    assert said["degrees"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 1}
    assert said["microbatches"] == 1 and said["bubble"] == 0.5
    assert [rank["blocks"] for rank in said["ranks"]] == [[[0, 1]], [[1, 2]]]
    assert "1 microbatches a step are fewer than the 2 ranks of the pipeline" in said["hints"][0]
    assert "50% of the rows of a step are padding" in said["hints"][1]


def test_another_world(capsys, recipe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    auto = ["--set", "machine.mesh.dp_shard=auto"]
    said = truestep(capsys, "check", recipe, *MESH, *auto, "--world", 64).out
    assert "64 processes: pp 2, dp_shard 16, tp 2" in said
    assert "The mesh is for 64 processes; `truestep run` alone starts 8 (machine.processes)." in said
    refused = truestep(capsys, "check", recipe, *MESH, "--world", 12)
    refused.refused("machine.mesh (dp_shard = 2, tp = 2, pp = 2) does not fit 12 processes", "is dp_shard = 3.")
    assert refused.out == ""


def test_what_plan_refuses(capsys, recipe):
    truestep(capsys, "plan", recipe, *MESH, "--stage", "bse").refused("--stage 'bse' is not one", "choose one of base")
    truestep(capsys, "plan", recipe, *MESH, "--rank", 3).refused(
        "--rank says which ranks to trace; give --dry-run as well"
    )
    own = ["--set", "model={module='my:Model'}"]
    truestep(capsys, "plan", recipe, *own).refused("needs the sizes of the model", "give [model] with vocab_size")


@pytest.mark.parametrize("numerics", ['reduction="exact"', 'low_precision={kind="fp8-rowwise"}'])
def test_a_dry_run_refuses_numerics_that_it_cannot_trace(capsys, recipe, numerics):
    ended = truestep(capsys, "plan", recipe, "--dry-run", "--set", f"numerics={{{numerics}}}")
    ended.refused(f"numerics.{numerics.partition('=')[0]}", "leave [numerics] out of the recipe")
