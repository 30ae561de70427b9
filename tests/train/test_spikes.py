"""The watcher of loss and gradient norm: what it calls a spike, what it remembers, and that all ranks decide alike."""

import json
import math

import numpy as np
import pytest
import torch

from tests import tiny
from tests.dist import run_ranks
from truestep.numerics.batch import IGNORE, Batch
from truestep.recipe.machine import Mesh
from truestep.recipe.sentinel import Spikes
from truestep.sentinel.finite import Verdict
from truestep.sentinel.spikes import SpikeWatch
from truestep.train.step import train_step


def fed(watch: SpikeWatch, pairs, start: int = 0) -> list[Verdict]:
    found = []
    for step, (loss, norm) in enumerate(pairs, start):
        judgement = watch.judge(loss, norm, scaled=False)
        watch.note(step, loss, norm, judgement)
        found.append(judgement.verdict)
    return found


def noise(count: int, seed: int = 0, spread: float = 0.05) -> list[tuple[float, float]]:
    draw = np.random.default_rng(seed)
    return [(3 + spread * a, math.exp(0.2 * b)) for a, b in draw.standard_normal((count, 2)).tolist()]


def test_noise_is_no_spike_and_a_spike_is_one_in_either_number():
    watch = SpikeWatch(Spikes(window=32))
    assert set(fed(watch, noise(500))) == {Verdict.GO}
    for loss, norm in ((9.0, 1.0), (3.0, 40.0)):
        judgement = watch.judge(loss, norm, scaled=False)
        assert (judgement.verdict, judgement.fault) == (Verdict.SKIP, "spike")
        assert "above the median" in judgement.reason and "of the last 32 updates" in judgement.reason
    assert watch.judge(0.1, 0.01, scaled=False).verdict is Verdict.GO  # good news is no spike


def test_the_bound_is_that_of_the_docstring():
    watch = SpikeWatch(Spikes(window=8, threshold=5.0))
    losses = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]  # median 4.5, MAD 2
    fed(watch, [(loss, 1.0) for loss in losses])
    bound = 4.5 + 5.0 * 1.4826 * 2
    assert watch.judge(bound, 1.0, scaled=False).verdict is Verdict.GO
    assert watch.judge(math.nextafter(bound, math.inf), 1.0, scaled=False).verdict is Verdict.SKIP


@pytest.mark.parametrize("level", [2.0, -2.0])
def test_a_flat_window_does_not_call_noise_a_spike(level):
    watch = SpikeWatch(Spikes(window=16))
    fed(watch, [(level, 1.0)] * 16)
    assert watch.judge(level + 0.5, 1.2, scaled=False).verdict is Verdict.GO  # within 20 x 1.4826 x 1 %
    assert watch.judge(level + 0.7, 1.2, scaled=False).verdict is Verdict.SKIP


def test_nothing_is_a_spike_before_half_a_window_was_taken():
    watch = SpikeWatch(Spikes(window=40))
    assert set(fed(watch, [(3.0, 1.0)] * 19 + [(300.0, 1.0)])) == {Verdict.GO}
    watch = SpikeWatch(Spikes(window=40))
    assert fed(watch, [(3.0, 1.0)] * 20 + [(300.0, 1.0)])[-1] is Verdict.SKIP


def test_skipped_steps_leave_the_window_alone():
    watch = SpikeWatch(Spikes(window=8, in_a_row=99))
    fed(watch, noise(8))
    before = watch.state()["losses"]
    assert set(fed(watch, [(99.0, 1.0)] * 20, 8)) == {Verdict.SKIP}
    assert watch.state()["losses"] == before and watch.skips == watch.in_a_row == 20 and watch.first_skipped == 8
    assert fed(watch, [(3.0, 1.0)], 28) == [Verdict.GO] and watch.in_a_row == 0


def test_not_finite_is_left_out_and_fp16_overflow_is_not_counted():
    watch = SpikeWatch()
    for loss, norm in ((math.nan, 1.0), (3.0, math.inf), (math.inf, math.nan)):
        judgement = watch.judge(loss, norm, scaled=False)
        assert (judgement.verdict, judgement.fault) == (Verdict.SKIP, "not finite")
    overflow = watch.judge(3.0, math.inf, scaled=True)
    watch.note(0, 3.0, math.inf, overflow)
    assert (overflow.verdict, overflow.fault, watch.skips) == (Verdict.SKIP, None, 0)
    assert watch.judge(math.nan, math.inf, scaled=True).fault == "not finite"
    say = SpikeWatch(Spikes(action="say"))
    assert say.judge(math.nan, 1.0, scaled=False).verdict is Verdict.HALT
    fed(say, noise(200))
    assert say.judge(99.0, 1.0, scaled=False).verdict is Verdict.GO


def test_state_goes_through_json_and_decides_the_same():
    draws = noise(300) + [(3.0 + 3 * (step % 7 == 0), 1.0) for step in range(100)]
    whole = SpikeWatch(Spikes(window=32, threshold=6.0))
    expected = fed(whole, draws)
    first = SpikeWatch(Spikes(window=32, threshold=6.0))
    found = fed(first, draws[:310])
    resumed = SpikeWatch(Spikes(window=32, threshold=6.0))
    resumed.load_state(json.loads(json.dumps(first.state())))
    found += fed(resumed, draws[310:], 310)
    assert found == expected and Verdict.SKIP in found and resumed.state() == whole.state()


def test_what_follows_a_row_of_spikes():
    watch = SpikeWatch(Spikes(window=8, in_a_row=3, skips=9, rollbacks=2))
    fed(watch, noise(12))
    bad = watch.judge(99.0, 1.0, scaled=False)

    def after(step: int):
        watch.note(step, 99.0, 1.0, bad)
        (alarm,) = watch.alarms(step, bad)
        return alarm

    assert [after(step).action for step in (12, 13)] == ["tell", "tell"]
    back = after(14)
    assert (back.action, back.fault.since, back.left_out) == ("roll back", 13, (12, 15))
    watch.rolled_back(12, watch.skips, watch.rollbacks)
    assert [after(step).action for step in (12, 13)] == ["tell", "tell"]
    back = after(14)  # no step was taken since: the checkpoint of step 12 is wrong itself
    assert (back.action, back.fault.since, back.left_out) == ("roll back", 12, (12, 15))
    watch.rolled_back(8, watch.skips, watch.rollbacks)
    assert [after(step).action for step in (8, 9)] == ["tell", "tell"]
    last = after(10)
    assert last.action == "halt" and "has rolled back 2 times" in last.fault.text
    over = after(11)
    assert over.action == "halt" and "more updates were left out than sentinel.spikes.skips = 9" in over.fault.text


def spoiled(batch: Batch) -> Batch:
    labels_BT = torch.where(batch.labels_BT == IGNORE, IGNORE, 96)
    return Batch(batch.tokens_BT, labels_BT, batch.positions_BT, batch.documents_BT)


def _train(rank: int, world: int, mesh: Mesh) -> tuple:
    training = tiny.state(tiny.job(rank, world), mesh=mesh, optim={"lr": 1e-3})
    training.spikes = SpikeWatch(Spikes(window=8, threshold=10.0))
    verdicts, weights = [], []
    groups = training.parallel.groups
    batches = tiny.rows(12)
    batches[10] = spoiled(batches[10])
    for batch in batches:
        result = train_step(training, tiny.share(batch, groups.data_rank, groups.data_size, 3), batch.num_targets, [])
        verdicts.append(result.verdict)
        weights.append([p.detach().clone() for p in training.parallel.locals().values()])
    kept = all(map(torch.equal, weights[9], weights[10])) and not all(map(torch.equal, weights[10], weights[11]))
    return verdicts, kept, training.updates, training.spikes.state()


@pytest.mark.parametrize(("world", "mesh"), [(1, Mesh()), (2, Mesh()), (2, Mesh(pp=2))], ids=["1", "fsdp", "pp"])
def test_all_ranks_leave_out_the_same_update(world, mesh):
    found = [_train(0, 1, mesh)] if world == 1 else run_ranks(_train, world, mesh)
    for verdicts, kept, updates, state in found:
        assert [step for step, verdict in enumerate(verdicts) if verdict is not Verdict.GO] == [10]
        assert kept and updates == 11 and state == found[0][3]


def test_norms_of_microbatches_are_unknown_in_a_pipeline():
    for norms in run_ranks(_norms, 2):
        assert len(norms) == 4 and all(map(math.isnan, norms))


def _norms(rank: int, world: int) -> list[float]:
    training = tiny.state(tiny.job(rank, world), mesh=Mesh(pp=2))
    batch = tiny.rows()[0]
    return [norm for _, _, norm in train_step(training, tiny.cut(batch, 3), batch.num_targets, []).shards]
