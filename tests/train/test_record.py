"""What the loop's recorder leaves in the log: repeats of exact sums, norms that nobody knows."""

import math
from pathlib import Path

from tests import tiny
from truestep.recipe.numerics import Numerics
from truestep.runlog.log import RunLog
from truestep.runlog.metrics import RankMetrics, read_metrics
from truestep.sentinel.finite import FINE
from truestep.train.record import Recorder
from truestep.train.step import StepResult, train_step


def test_repeats_of_exact_sums_are_counted():
    training = tiny.state(tiny.job(), numerics=Numerics(reduction="exact"))
    first, second = (train_step(training, [batch], batch.num_targets, []) for batch in tiny.rows(2))
    assert first.troubles == ["overflow"] and first.metrics["redone: overflow"] == 1.0  # scales that nobody knew yet
    assert second.troubles == [] and not any("redone" in name for name in second.metrics)


def test_a_norm_that_is_not_known_is_no_number(tmp_path: Path):
    recorder = Recorder("base", RankMetrics(tmp_path, 1, 0), RunLog(tmp_path, 1))
    shards = [(3.0, 2.0, math.nan), (4.0, 2.0, math.nan)]
    recorder.step(tiny.state(tiny.job()), StepResult(1.75, 1.0, 1.0, 4, FINE, shards), 64, 0.1, 0.0)
    recorder.metrics.flush()
    found = read_metrics(tmp_path)
    assert found["loss_sum"].to_pylist() == [3.0, 4.0] and all(map(math.isnan, found["grad_norm"].to_pylist()))
