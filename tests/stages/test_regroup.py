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
    "rank 1 in forward": Kill(1, "forward", 4 * 7 + 2),
    "rank 0 in forward": Kill(0, "forward", 4 * 7 + 2),
    "rank 2 in backward": Kill(2, "backward", 4 * 6 + 1),
    "rank 0 in backward": Kill(0, "backward", 4 * 6 + 1),
    "rank 0 in a save": Kill(0, "parts assigned", 2),
    "rank 1 in a save": Kill(1, "report sent", 2),
    "rank 2 in the last save": Kill(2, "part assigned", 3),
    "rank 0 in the last save": Kill(0, "parts assigned", 3),
    "rank 0 in an evaluation": Kill(0, "evaluate", 2),
    "rank 2 in an evaluation": Kill(2, "evaluate", 2),
}


@pytest.mark.parametrize("name", KILLS)
def test_survivors_regroup_and_end_with_the_same_weights(name, undisturbed, tmp_path):
    folder, weights = undisturbed
    run = name.replace(" ", "-")
    agent = Agent(tmp_path, exact(folder, run), 3)
    agent.run(KILLS[name])
    run_dir = folder / "runs" / run
    verify(run_dir)
    assert agent.codes == [0, 0] and len(agent.said) == 2
    assert manifest(run_dir)["weights"] == weights
    starts = [r.data for r in read(run_dir) if r.kind == "attempt_start"]
    assert [start.world for start in starts] == [3, 2]
