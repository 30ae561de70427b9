"""Each switch of [sentinel] that is on lets its own watcher see what is wrong; off, nobody looks."""

import pytest
import torch

from tests import small_run
from truestep.cli import verbs
from truestep.errors import UserError
from truestep.runlog.log import read
from truestep.runlog.records import Fault
from truestep.sentinel.alarm import Alarm
from truestep.sentinel.statistics import Statistics

OFF = {"check_host": False, "invariants": False, "statistics": False, "digest_share": 0.0, "replay_share": 0.0}


@pytest.fixture(autouse=True)
def all_is_wrong(monkeypatch):
    """The device multiplies wrongly where it is tested, a rule is broken, and every step has a suspect."""
    right = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: right(a, b) if a.dtype != torch.float64 else right(a, b) + 1
    )
    monkeypatch.setattr("truestep.train.invariants.violations", lambda view: ["a rule is broken"])
    suspect = Alarm(Fault(kind="statistics", text="a suspect"))
    monkeypatch.setattr(Statistics, "alarms", lambda self, step: [suspect])
    monkeypatch.setattr("truestep.cli.verbs.report", lambda run_dir: run_dir)


def run(folder, **on: bool) -> list[str]:
    """Kinds of the faults in the log of a run, without those that end it."""
    body = small_run.recipe(folder, tokens=5 * 12 * 32) | {"sentinel": OFF | on}
    verbs.run(body)
    return [record.data.kind for record in read(folder / "runs" / "small") if record.kind == "fault"]


def test_off_nobody_looks(tmp_path):
    assert run(tmp_path) == []


def test_statistics_tell(tmp_path):
    assert run(tmp_path, statistics=True) == ["statistics"] * 5


@pytest.mark.parametrize(
    ("switch", "says"), [("check_host", "float64 are wrong"), ("invariants", "a rule is broken .*this is a bug")]
)
def test_what_ends_a_run(tmp_path, switch, says):
    with pytest.raises(UserError, match=says):
        run(tmp_path, **{switch: True})
