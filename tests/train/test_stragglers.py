"""Slow ranks: who is named by which times, and what a run does about one, on real ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest
import torch

from tests import small_run, tiny
from tests.dist import run_job, run_ranks
from tests.stages.test_run import manifest
from tests.train.test_exact_step import _alone
from truestep.checkpoint import control
from truestep.data.shares import Shares
from truestep.errors import Again
from truestep.models.decoder import Decoder
from truestep.numerics.digest import state_digest
from truestep.parallel.environment import Place
from truestep.recipe.load import load
from truestep.recipe.machine import Mesh
from truestep.recipe.numerics import Numerics
from truestep.runlog.log import read
from truestep.stages.run import carry_out
from truestep.train import pace
from truestep.train.state import TrainState
from truestep.train.step import stream, train_step
from truestep.train.stragglers import Stragglers


def windows(own_WR: list[list[float]], classes: list[int] | None = None) -> list[list[int]]:
    """The ranks that are named after each window."""
    watch = Stragglers(classes or [0] * len(own_WR[0]))
    return [[slow.rank for slow in watch.look(own_R)] for own_R in own_WR]


def noisy(count: int, factors: list[float], seed: int = 0) -> list[list[float]]:
    random = np.random.default_rng(seed)
    return (np.array(factors) * (1 + 0.05 * random.standard_normal((count, len(factors))))).tolist()


def test_a_rank_that_stays_slow_is_named_in_its_third_window():
    assert windows(noisy(4, [1, 1, 1.6, 1])) == [[], [], [2], [2]]


def test_two_ranks_are_enough():
    assert windows(noisy(3, [1, 2]))[-1] == [1]


def test_one_slow_window_is_nothing():
    assert windows([*noisy(3, [1, 1, 1]), *noisy(1, [1, 3, 1]), *noisy(6, [1, 1, 1])]) == [[]] * 10


def test_clean_ranks_are_never_named():
    assert all(not found for seed in range(50) for found in windows(noisy(40, [1.0] * 6, seed)))


def test_steps_that_get_longer_for_all_are_no_fault():
    assert windows([*noisy(8, [1, 1, 1]), *noisy(8, [2, 2, 2])]) == [[]] * 16


def test_ranks_of_unequal_work_are_held_against_their_own_past():
    classes = [0, 1, 2]  # a pipeline of three
    usual = noisy(8, [1, 2, 4])
    assert windows(usual, classes) == [[]] * 8
    assert windows([*usual, *noisy(3, [1, 3.2, 4])], classes)[-1] == [1]
    assert windows([*usual, *noisy(8, [2, 4, 8])], classes)[-1] == []


def test_it_is_no_longer_named_once_it_is_quick_again():
    found = windows([*noisy(4, [1, 1, 2]), *noisy(4, [1, 1, 1])])
    assert found[3] == [2] and found[4:] == [[]] * 4


# Real ranks


@contextmanager
def _watched(training: TrainState) -> Iterator[list[int]]:
    """The seeds of torch's generator for the microbatches that are really computed."""
    seeds: list[int] = []
    real = training.parallel.run

    def run(batches, loss_of, factor, begin):
        def beginning(index: int) -> None:
            begin(index)
            seeds.append(torch.initial_seed())

        return real(batches, loss_of, factor, beginning)

    training.parallel.run = run
    yield seeds
    training.parallel.run = real


def _uneven(rank: int, world: int, mesh: dict, pace_s: list[float]) -> tuple:
    """As tests.train.test_exact_step, with microbatches dealt out by the pace of replicas from the second step on."""
    with torch.device("meta"):
        model = Decoder(tiny.section(num_layers=4, tie_embeddings=True))
    training = tiny.state(
        tiny.job(rank, world),
        mesh=Mesh(**mesh),
        model=model,
        optim={"lr": 1e-2, "clip_norm": 0.1},
        numerics=Numerics(reduction="exact"),
    )
    groups, found = training.parallel.groups, []
    size = tiny.ROWS // 6  # six microbatches, as the reference has
    training.shares = Shares(groups.degrees.dp_replicate, groups.degrees.dp_shard, lambda step: 6)
    for step, batch in enumerate(tiny.rows(3)):
        if step == 1:
            assert training.shares.deal(step, pace_s)
        whole = tiny.cut(batch, size)
        mine = [whole[number] for number in training.shares.mine(step, groups.data_rank)]
        mine += [tiny.padding(whole[0])] * (training.shares.rounds(step) - len(mine))
        with _watched(training) as seeds:
            result = train_step(training, mine, batch.num_targets, [])
        active = len(mine) if step == 0 else training.shares.active(step, groups.data_rank)
        assert len(seeds) == active * (1 + len(result.troubles))  # a step may be computed again
        dealt = [training.shares.number(index, groups.data_rank) for index in range(active)]
        assert seeds[:active] == [stream(training.seed, step, number) for number in dealt]
        found.append((result.loss, result.grad_norm, result.metrics["nll"], result.clip))
        assert len(result.shards) == training.shares.rounds(step)
    return found, state_digest(training.parallel.pieces())


@pytest.mark.parametrize(
    "world,mesh,pace_s",
    [(2, {"dp_replicate": 2, "dp_shard": 1}, [1.0, 5.0]), (4, {"dp_replicate": 2, "dp_shard": 2}, [3.0, 1.0])],
)
def test_uneven_shares_change_no_bit_with_exact_reductions(world, mesh, pace_s):
    assert run_ranks(_uneven, world, mesh, pace_s)[0] == _alone("exact", True)


def _slowed(rank: int, world: int, body: dict, victim: int) -> str:
    """A whole run in which one rank's blocks take five times as long as those of others: by a clock of their own, which
    goes on by 1 or 5 seconds with every look, so that whatever else this machine does plays no part."""
    pace.EVERY = 2
    if rank:  # hears late that the last checkpoint is there, when rank 0 is about to leave
        control.SHORTEST_WAIT_S = control.LONGEST_WAIT_S = 0.4
    looks = count(step=5 if rank == victim else 1)
    pace.BlockTimer._now = lambda timer: next(looks)
    try:
        return carry_out(load(body), Place(rank, world, rank, world, "test"), "")
    except Again as end:
        return f"again without {end.without}"


def slowed(folder, name: str, **machine) -> dict:
    body = small_run.with_machine(small_run.recipe(folder, name=name, tokens=14 * 12 * 32), **machine)
    body["checkpoint"] = {"every": 6, "every_time": "1h"}
    return body | {"numerics": {"reduction": "exact"}}


def records(run_dir, kind: str) -> list:
    return [record.data for record in read(run_dir) if record.kind == kind]


def test_a_slow_replica_is_named_and_gets_fewer_microbatches(tmp_path, monkeypatch):
    body = slowed(tmp_path, "slow", mesh={"dp_replicate": 2, "dp_shard": 1})
    assert run_job(_slowed, 2, body, 1) == ["finished"] * 2
    assert run_job(_slowed, 1, slowed(tmp_path, "alone"), 7) == ["finished"]
    slow, alone = tmp_path / "runs" / "slow", tmp_path / "runs" / "alone"
    (fault,) = [fault for fault in records(slow, "fault") if fault.kind == "straggler"]
    assert (fault.rank, fault.named) == (1, True) and fault.evidence["against_others"] == pytest.approx(5, rel=0.1)
    first, *_ = records(slow, "decision")
    assert first.action == "rebalance" and first.turns.count(1) < first.turns.count(0)
    assert all(set(one.seconds) >= {"compute", "data", "update", "own"} for one in records(slow, "sections"))
    assert manifest(slow)["weights"] == manifest(alone)["weights"]
    targets = lambda run: [(step.step, step.targets) for step in records(run, "step")]  # noqa: E731
    assert targets(slow) == targets(alone)


def test_a_slow_rank_of_a_sharded_model_is_given_up_where_a_supervisor_can_do_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUESTEP_SUPERVISED", "1")
    body = slowed(tmp_path, "evicted", mesh={"dp_shard": 2}, elastic={"min": 1})
    monkeypatch.setenv("TRUESTEP_HOST", "host-of-all")
    body["machine"]["elastic"] = {"min": 1, "spares": 1}
    ended = run_job(_slowed, 2, body, 1)
    assert ended == ["again without ('host-of-all',)"] * 2
    run_dir = tmp_path / "runs" / "evicted"
    assert records(run_dir, "decision") == [] and records(run_dir, "attempt_end")[-1].reason == "again"
    (fault,) = [fault for fault in records(run_dir, "fault") if fault.kind == "straggler"]
    (last,) = [save.step for save in records(run_dir, "save") if save.step >= fault.step]
    assert last == max(step.step for step in records(run_dir, "step"))
    ask = (run_dir / "elastic" / "ask.json").read_text()
    assert '"without": ["host-of-all"]' in ask


def test_without_a_supervisor_it_is_only_said(tmp_path, capfd):
    body = slowed(tmp_path, "said", mesh={"dp_shard": 2})
    assert run_job(_slowed, 2, body, 0) == ["finished"] * 2
    run_dir = tmp_path / "runs" / "said"
    assert [fault.rank for fault in records(run_dir, "fault") if fault.kind == "straggler"] == [0]
    assert records(run_dir, "decision") == []
    assert "nothing can take its place" in capfd.readouterr().out
