"""Digests of gradient and state: the same text on any mesh that computes the same bits, in log and checkpoints."""

from threading import Event

import pytest

from tests import small_run, tiny
from tests.dist import run_job
from truestep.checkpoint import checkpointer
from truestep.checkpoint.catalogue import newest, read_manifest
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.manifest import FINGERPRINTS
from truestep.cli import verbs
from truestep.numerics.fingerprint import combined, fingerprints
from truestep.runlog.digests import read_digests
from truestep.runlog.log import read
from truestep.storage.store import open_store
from truestep.train.digests import Digests


def _carry_out(rank, world, body, *overrides):
    return verbs.run(body, overrides).reason


def _exact(folder, name: str, **machine) -> dict:
    body = small_run.recipe(folder, name=name, tokens=4 * 12 * 32)
    return small_run.with_machine(body, **machine) | {
        "numerics": {"reduction": "exact"},
        "sentinel": {"sweep_every": 2},
        "checkpoint": {"every": 3, "every_time": "1h"},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same training on one process, on two that share the state, and on a pipeline of two."""
    folder = tmp_path_factory.mktemp("digests")
    verbs.run(_exact(folder, "one"))
    run_job(_carry_out, 2, _exact(folder, "two"))
    run_job(_carry_out, 2, _exact(folder, "pipeline", mesh={"pp": 2}))
    return folder / "runs"


def _logged(run_dir) -> list[tuple]:
    return sorted((r.data.step, r.data.gradient, r.data.state) for r in read(run_dir) if r.kind == "digest")


def test_the_same_on_every_mesh(runs):
    one = _logged(runs / "one")
    assert [step for step, *_ in one] == [2, 3, 4]
    assert [bool(gradient) for _, gradient, _ in one] == [True, False, True], "at a save the state alone"
    assert len({text for _, *texts in one for text in texts if text}) == 5
    assert _logged(runs / "two") == _logged(runs / "pipeline") == one


def test_rows_say_every_tensor(runs):
    for name in ("one", "two", "pipeline"):
        (_, gradient, state), *_ = _logged(runs / name)
        rows = read_digests(runs / name, 1, "base", 2)
        assert combined(rows["gradient"], rows["gradient"].values()) == gradient
        assert combined(rows["state"], rows["state"].values()) == state
        assert (
            "blocks.1.mlp.down.weight" in rows["gradient"] and "optim.blocks.1.mlp.down.weight.exp_avg" in rows["state"]
        )


def test_a_checkpoint_says_what_the_log_says(runs):
    for name in ("one", "two"):
        store = open_store(str(runs / name / "checkpoints" / "base"), {})
        committed = newest(store)
        assert committed is not None and committed.step == 4
        said = read_manifest(store, committed).facts[FINGERPRINTS]
        assert combined(said, said.values()) == _logged(runs / name)[-1][2]


def test_a_state_that_was_put_back_is_looked_at_anew():
    """After a roll-back the same step may come again with another state, without another digest in between."""
    state = tiny.state(tiny.job())
    state.digests = Digests("base", state.job, state.parallel.gradients, state.tensors)
    before = dict(state.digests.state(0))
    state.tensors()["model.embed.weight"].local.zero_()
    state.restore(state.extra())
    after = state.digests.state(0)
    assert [name for name in before if after[name] != before[name]] == ["model.embed.weight"]


def test_an_update_waits_until_the_state_was_read(runs, tmp_path, monkeypatch):
    """Fingerprints of a save that begin no sooner than the next update is about to."""
    about_to, release = Event(), Checkpointer.release

    def slow(*args):
        about_to.wait(2.0)
        about_to.clear()
        return fingerprints(*args)

    monkeypatch.setattr(checkpointer, "fingerprints", slow)
    monkeypatch.setattr(Checkpointer, "release", lambda self: (about_to.set(), release(self)))
    verbs.run(_exact(tmp_path, "slow"))
    assert _logged(tmp_path / "runs" / "slow") == _logged(runs / "one")
