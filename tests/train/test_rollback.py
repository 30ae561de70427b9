"""Roll-backs in place: bad rows are left out, all others are trained on once, and the end is bitwise that of a run that
never had the bad ones, however it came about."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import small_run
from tests.dist import run_job
from truestep.checkpoint.catalogue import list_committed
from truestep.cli import verbs
from truestep.data.loader import Loader
from truestep.errors import Again
from truestep.losses.base import LossSum
from truestep.losses.cross_entropy import CrossEntropy
from truestep.numerics.batch import IGNORE, Batch
from truestep.numerics.head import HeadInput
from truestep.runlog.log import read
from truestep.runlog.metrics import read_metrics
from truestep.runlog.records import Fault
from truestep.storage.store import open_store
from truestep.train.guard import Corruption
from truestep.train.record import Recorder
from truestep.train.step import train_step

BAD = 255  # a byte that no text has
ROWS = 12  # of a step


class NanOnBad(CrossEntropy):
    """Cross-entropy that is not a number where a label is BAD."""

    def __call__(self, out: HeadInput, batch: Batch) -> LossSum:
        found = super().__call__(out, batch)
        good = torch.where((batch.labels_BT == BAD).any(), torch.nan, 1.0)
        return LossSum(found.sum * good, found.metrics)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """Plots take longer than these runs."""
    monkeypatch.setattr("truestep.cli.verbs.report", lambda run_dir: run_dir)


@pytest.fixture
def poison(monkeypatch):
    """Lets global rows of some ranges hold nothing but a byte that the model never sees."""

    def begin(*ranges: tuple[int, int]) -> None:
        clean, bad = Loader.rows, np.concatenate([np.arange(*each) for each in ranges])

        def rows(self: Loader, global_rows: np.ndarray) -> Batch:
            batch = clean(self, global_rows)
            here = torch.from_numpy(np.isin(global_rows, bad))[:, None]
            labels_BT = torch.where(here & (batch.labels_BT != IGNORE), BAD, batch.labels_BT)
            return Batch(batch.tokens_BT, labels_BT, batch.positions_BT, batch.documents_BT)

        monkeypatch.setattr(Loader, "rows", rows)

    return begin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rollback")


@pytest.fixture(scope="module")
def never_bad(folder):
    """The weights of a run whose loader leaves out these rows from the beginning, on `world` processes."""
    made: dict[tuple, dict[str, torch.Tensor]] = {}

    def weights_without(*skip: tuple[int, int], world: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
        key = (skip, world, str(changes))
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                begin = Loader.__init__
                patch.setattr(Loader, "__init__", lambda self, *args: begin(self, *args, skip=skip))
                body = recipe(folder, f"never-bad-{len(made)}", every=0, **changes)
                made[key] = weights(carry_out(body, world))
        return made[key]

    return weights_without


def recipe(folder: Path, name: str, every: int = 5, optim=None, numerics=None, loss=None, **spikes: Any) -> dict:
    body = small_run.recipe(folder, name, gate={"kind": "none", "reason": "a trial"})
    stage = body["stages"][0]
    stage.pop("evaluate")
    stage["optim"] |= optim or {}
    if loss:
        stage["loss"] = {"kind": loss}
    body["data"].pop("heldout")
    given = {"window": 8, "threshold": 35.0, "in_a_row": 3} | spikes
    changed = {"checkpoint": {"every": every, "every_time": "1h"}, "sentinel": {"spikes": given}}
    return body | changed | ({"numerics": numerics} if numerics else {})


def _rank(rank: int, world: int, body: dict) -> str:
    return verbs.run(body).reason


def carry_out(body: dict, world: int = 1) -> Path:
    reasons = [verbs.run(body).reason] if world == 1 else run_job(_rank, world, body)
    assert reasons == ["finished"] * world
    return Path(body["run"]["dir"]) / body["run"]["name"]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "models" / "base" / "model.safetensors")


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def records(run_dir: Path, kind: str) -> list[Any]:
    return [record.data for record in read(run_dir) if record.kind == kind]


def assert_every_row_counts_once(run_dir: Path) -> None:
    """The newest checkpoint's counters, and the rows of shards that stand, are those of 20 whole steps (C44, C47)."""
    rows = read_metrics(run_dir)
    steps = {s.step: s for s in records(run_dir, "step")}
    assert sorted(steps) == list(range(1, 21))
    assert sorted(set(zip(rows["step"].to_pylist(), rows["rank"].to_pylist(), rows["microbatch"].to_pylist()))) == (
        sorted(zip(rows["step"].to_pylist(), rows["rank"].to_pylist(), rows["microbatch"].to_pylist()))
    )
    assert sum(rows["weight"].to_pylist()) == sum(s.targets for s in steps.values())


def test_bad_rows_are_left_out_and_the_rest_is_as_if_they_had_never_been(folder, poison, never_bad):
    reference = never_bad((144, 180), world=2)
    poison((144, 180))
    run_dir = carry_out(recipe(folder, "bad"), 2)
    assert_same_bits(weights(run_dir), reference)
    (back,) = records(run_dir, "decision")
    assert (back.action, back.step, back.to_step, back.left_out) == ("roll back", 15, 10, [144, 180])
    assert [(s.step, "median" in s.reason) for s in records(run_dir, "skip")] == [(13, True), (14, True), (15, True)]
    assert [f.kind for f in records(run_dir, "fault")] == ["spike"] * 3
    assert_every_row_counts_once(run_dir)


@pytest.mark.parametrize(
    ("optim", "numerics"),
    [({"kind": "muon", "muon_lr": 1e-3}, {}), ({}, {"reduction": "exact"})],
    ids=["muon", "exact"],
)
def test_without_a_checkpoint_the_run_goes_back_to_its_beginning(folder, poison, never_bad, optim, numerics):
    reference = never_bad((144, 180), optim=optim, numerics=numerics)
    poison((144, 180))
    name = f"anew-{optim.get('kind', 'adamw')}"
    run_dir = carry_out(recipe(folder, name, every=0, optim=optim, numerics=numerics, threshold=15.0))
    assert [d.to_step for d in records(run_dir, "decision")] == [0]
    assert_same_bits(weights(run_dir), reference)


def test_bad_rows_that_go_on_lead_further_back_and_what_was_left_out_stays_so(folder, poison, never_bad):
    """The second time no step is taken after the checkpoint: it may itself be what is wrong."""
    reference = never_bad((120, 192))
    poison((120, 192))
    run_dir = carry_out(recipe(folder, "further"))
    assert_same_bits(weights(run_dir), reference)
    backs = [(d.to_step, d.left_out) for d in records(run_dir, "decision")]
    assert backs == [(10, [120, 156]), (5, [156, 192])]
    assert_every_row_counts_once(run_dir)


def _killed(body: dict, action: str) -> None:
    """Run until `action` of the recorder is called for what comes with the roll-back, and die there."""
    plain = getattr(Recorder, action)

    def last(self: Recorder, what: Any) -> None:
        plain(self, what)
        rolled_back = getattr(what, "action", "") == "roll back" or getattr(what, "step", 0) == 15
        if rolled_back:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Recorder, action, last)
    verbs.run(body)


@pytest.mark.parametrize("action", ["decision", "saved"])
def test_killed_after_the_roll_back_it_ends_the_same(folder, poison, never_bad, action):
    """Before what is left out was saved: the run finds the rows bad again. After that: it remembers (C44, C45)."""
    reference = never_bad((144, 180))
    poison((144, 180))
    body = recipe(folder, f"killed-{action}")
    child = multiprocessing.get_context("fork").Process(target=_killed, args=(body, action))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    run_dir = carry_out(body)
    assert_same_bits(weights(run_dir), reference)
    assert [d.left_out for d in records(run_dir, "decision")] == [[144, 180]] * (2 if action == "decision" else 1)
    (resume,) = records(run_dir, "resume")
    assert resume.step == (10 if action == "decision" else 15)


def test_numbers_that_are_not_finite_are_left_out_in_the_same_way(folder, poison, never_bad):
    loss = "tests.train.test_rollback:NanOnBad"
    reference = never_bad((144, 180), loss=loss)
    poison((144, 180))
    run_dir = carry_out(recipe(folder, "nan", loss=loss))
    assert_same_bits(weights(run_dir), reference)
    assert [f.kind for f in records(run_dir, "fault")] == ["not finite"] * 3


def test_one_bad_step_is_skipped_and_data_and_schedule_go_on(folder, poison):
    poison((144, 156))
    run_dir = carry_out(recipe(folder, "one"))
    steps = records(run_dir, "step")
    assert [s.step for s in steps if s.skipped] == [13] and len(steps) == 20
    assert steps[12].lr == steps[11].lr  # of the update before: this one was not taken
    assert records(run_dir, "decision") == []


@pytest.mark.parametrize(
    ("spikes", "says"),
    [
        ({"rollbacks": 0}, r"3 updates in a row were left out, and the run has rolled back 0 times; look at the data"),
        ({"skips": 1}, r"step 14: .*more updates were left out than sentinel\.spikes\.skips = 1"),
        ({"action": "say"}, ""),
    ],
    ids=["rollbacks", "skips", "say"],
)
def test_budgets_end_the_run_in_one_sentence_and_say_only_tells(folder, poison, spikes, says):
    poison((144, 180))
    body = recipe(folder, f"budget-{next(iter(spikes))}", **spikes)
    if "action" in spikes:
        body["sentinel"]["spikes"].pop("in_a_row")
        run_dir = carry_out(body)
        assert not records(run_dir, "skip") and len(records(run_dir, "fault")) >= 1
        assert not any(s.skipped for s in records(run_dir, "step"))
        return
    with pytest.raises(verbs.UserError, match=says) as found:
        verbs.run(body)
    assert "\n" not in str(found.value)


def corrupt_at(monkeypatch, step: int, host: str | None) -> None:
    """Once, before the update of `step` (counted from 1), all ranks find that bits have changed since step 7."""
    told = []

    def faulty(state, *args):
        if state.step + 1 == step and not told:
            told.append(step)
            text = "state differs from its digest"
            raise Corruption([Fault(kind="state", text=text, step=step, host=host, named=host is not None, since=7)])
        return train_step(state, *args)

    monkeypatch.setattr("truestep.train.loop.train_step", faulty)


def test_corruption_goes_back_to_before_it_with_the_same_data(folder, never_bad, monkeypatch):
    reference = never_bad(world=2)
    corrupt_at(monkeypatch, 12, "h2")
    run_dir = carry_out(recipe(folder, "corrupt"), 2)
    assert_same_bits(weights(run_dir), reference)
    (back,) = records(run_dir, "decision")
    assert (back.to_step, back.left_out) == (5, [])  # step 10 was saved, but after step 7
    assert [f.kind for f in records(run_dir, "fault")] == ["state"]


@pytest.mark.parametrize("supervised", [False, True])
def test_a_device_that_fails_its_test_in_between_ends_the_attempt(folder, monkeypatch, supervised):
    """After the evaluation of step 7; step 5 was saved, so that a run that went back would evaluate again for ever."""
    monkeypatch.setattr("truestep.train.integrity.check_device", lambda *args: "1 of 9 elements are wrong")
    monkeypatch.setenv("TRUESTEP_HOST", "h2")
    if supervised:
        monkeypatch.setenv("TRUESTEP_SUPERVISED", "1")
    name = f"device-{supervised}"
    body = small_run.recipe(folder, name) | {"checkpoint": {"every": 5, "every_time": "1h"}}
    with pytest.raises(Again if supervised else verbs.UserError, match=r"host h2.*1 of 9 elements are wrong") as end:
        verbs.run(body)
    (fault,) = records(folder / "runs" / name, "fault")
    assert (fault.kind, fault.step, fault.host) == ("host", 8, "h2")
    assert not supervised or end.value.without == ("h2",)


def test_where_a_supervisor_is_the_attempt_ends_and_asks_for_other_hosts(folder, never_bad, monkeypatch):
    reference = never_bad()
    corrupt_at(monkeypatch, 12, "h2")
    monkeypatch.setenv("TRUESTEP_SUPERVISED", "1")
    body = recipe(folder, "supervised")
    with pytest.raises(Again) as asked:
        verbs.run(body)
    assert asked.value.without == ("h2",)
    run_dir = folder / "runs" / "supervised"
    assert [c.step for c in list_committed(open_store(str(run_dir / "checkpoints" / "base")))] == [5]
    assert [(d.action, d.host) for d in records(run_dir, "decision")] == [("quarantine", "h2")]
    assert_same_bits(weights(carry_out(body)), reference)
    assert [r.step for r in records(run_dir, "resume")] == [5]
