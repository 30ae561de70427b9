"""What the loop's recorder leaves in the log: repeats of exact sums, damage of collectives, norms that nobody knows."""

import math
from pathlib import Path

from tests import tiny
from truestep.recipe.numerics import Numerics
from truestep.runlog.log import RunLog, read
from truestep.runlog.metrics import RankMetrics, read_metrics
from truestep.sentinel.finite import FINE
from truestep.train.record import Recorder
from truestep.train.step import StepResult, train_step


def test_repeats_of_exact_sums_are_counted():
    training = tiny.state(tiny.job(), numerics=Numerics(reduction="exact"))
    first, second = (train_step(training, [batch], batch.num_targets, []) for batch in tiny.rows(2))
    assert first.troubles == ["overflow"] and first.metrics["redone: overflow"] == 1.0  # scales that nobody knew yet
    assert second.troubles == [] and not any("redone" in name for name in second.metrics)


def test_damage_is_a_fault_and_said(tmp_path: Path):
    said = []

    class Watcher:
        def step(self, *args: object) -> None: ...
        def held_out(self, *args: object) -> None: ...
        def alarm(self, text: str) -> None:
            said.append(text)

    log = RunLog(tmp_path, 1)
    recorder = Recorder("base", RankMetrics(tmp_path, 1, 0), log, Watcher())
    training = tiny.state(tiny.job())
    training.step = 7
    shards = [(3.0, 2.0, math.nan), (4.0, 2.0, math.nan)]
    recorder.step(training, StepResult(1.75, 1.0, 1.0, 4, FINE, shards, troubles=["damaged", "damaged"]), 64, 0.1, 0.0)
    recorder.metrics.flush()
    faults = [record.data for record in read(tmp_path) if record.kind == "fault"]
    assert [(fault.kind, fault.step, fault.named) for fault in faults] == [("collective", 7, False)]
    assert len(said) == 1 and "bits changed in a collective" in said[0]
    assert all(map(math.isnan, read_metrics(tmp_path)["grad_norm"].to_pylist()))
