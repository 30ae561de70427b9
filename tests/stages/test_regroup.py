"""A rank is killed in the middle of a run: the others form a new group in place, and the weights end the same."""

from pathlib import Path

import pytest

from tests import small_run
from tests.stages.regroup import Agent, Kill
from tests.stages.test_run import manifest
from truestep.recipe.load import load
from truestep.runlog.log import read, verify
from truestep.stages.run import carry_out


def exact(folder: Path, name: str) -> dict:
    """A run whose bits do not depend on the number of ranks."""
    body = small_run.recipe(folder, name=name, tokens=12 * 12 * 32)
    body["checkpoint"] = {"every": 4, "every_time": "1h"}
    return body | {"numerics": {"reduction": "exact"}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("regroup")
    assert carry_out(load(exact(folder, "undisturbed")), None, "") == "finished"
    return folder, manifest(folder / "runs" / "undisturbed")["weights"]


KILLS = {
    "rank 0 in backward": Kill(0, "backward", 4 * 6 + 1),
    "rank 1 in a save": Kill(1, "report sent", 2),
    "rank 0 in an evaluation": Kill(0, "evaluate", 2),
}
MORE_KILLS = {
    "rank 2 in the last save": Kill(2, "part assigned", 3),
    "rank 1 in forward": Kill(1, "forward", 4 * 7 + 2),
    "rank 0 in forward": Kill(0, "forward", 4 * 7 + 2),
    "rank 2 in backward": Kill(2, "backward", 4 * 6 + 1),
    "rank 0 in a save": Kill(0, "parts assigned", 2),
    "rank 0 in the last save": Kill(0, "parts assigned", 3),
    "rank 2 in an evaluation": Kill(2, "evaluate", 2),
}


def worlds(run_dir: Path) -> list[int]:
    return [record.data.world for record in read(run_dir) if record.kind == "attempt_start"]


def regroups(name: str, kill: Kill, undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    folder, weights = undisturbed
    run = name.replace(" ", "-")
    agent = Agent(tmp_path, exact(folder, run), 3)
    agent.run(kill)
    run_dir = folder / "runs" / run
    verify(run_dir)
    assert agent.codes == [0, 0] and len(agent.said) == 2
    if "save" not in name:  # a save that was given up may take a moment to end by itself
        assert agent.left == [(0, 0)] * 2
    assert manifest(run_dir)["weights"] == weights
    assert worlds(run_dir) == [3, 2]


@pytest.mark.parametrize("name", KILLS)
def test_survivors_regroup_and_end_with_the_same_weights(name, undisturbed, tmp_path):
    regroups(name, KILLS[name], undisturbed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_KILLS)
def test_survivors_of_other_kills_do_so_too(name, undisturbed, tmp_path):
    regroups(name, MORE_KILLS[name], undisturbed, tmp_path)


@pytest.mark.parametrize("victim", [0, 2])
def test_who_waits_for_a_commit_and_not_in_a_collective_hears_of_it_too(victim, undisturbed, tmp_path):
    """Without a last evaluation the survivors of a kill in the last save have nothing to do but to wait for it."""
    folder, weights = undisturbed
    body = exact(folder, f"waits-{victim}")
    body["stages"][0] = body["stages"][0] | {"gate": {"kind": "none", "reason": "a trial"}}
    del body["stages"][0]["evaluate"], body["data"]["heldout"]
    agent = Agent(tmp_path, body, 3)
    agent.run(Kill(victim, "part assigned", 3))
    run_dir = folder / "runs" / body["run"]["name"]
    assert worlds(run_dir) == [3, 2] and manifest(run_dir)["weights"] == weights


def test_new_processes_join_those_that_were_there_before_and_nothing_is_left_behind(undisturbed, tmp_path):
    """Two failures, each made good by a new process, which knows nothing of what the others have been through."""
    folder, weights = undisturbed
    agent = Agent(tmp_path, exact(folder, "replaced"), 3, replace=True)
    agent.run(Kill(1, "forward", 4 * 5), Kill(2, "forward", 4 * 10))
    run_dir = folder / "runs" / "replaced"
    assert agent.codes == [0, 0, 0] and worlds(run_dir) == [3, 3, 3]
    assert manifest(run_dir)["weights"] == weights
    assert agent.left == [(0, 0)] * 3  # of two survivors, twice, but for the one that was killed in between
