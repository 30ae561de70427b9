"""Suspects among shards: how often clean ones are suspected, whatever the tail of the noise, and what is seen."""

from collections.abc import Callable

import numpy as np
import pytest

from truestep.sentinel import statistics
from truestep.sentinel.statistics import Statistics, apart

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
NOISE: dict[str, Draw] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "laplace": lambda random, shape: random.laplace(size=shape),
    "student 2": lambda random, shape: random.standard_t(2, shape),
    "student 3": lambda random, shape: random.standard_t(3, shape),
    "log-normal": lambda random, shape: random.lognormal(0, 1, shape),
    "wide log-normal": lambda random, shape: random.lognormal(0, 1.5, shape),
    "pareto 1.2": lambda random, shape: random.pareto(1.2, shape),
    "one in 1,000 ten times as wide": lambda random, shape: (
        random.standard_normal(shape) * np.where(random.random(shape) < 1e-3, 10, 1)
    ),
}
QUICK = ("normal", "student 2", "student 3", "log-normal", "one in 1,000 ten times as wide")
RANKS, MICROBATCHES = 64, 8


def shards(draw: Draw, steps: int, seed: int, ranks: int = RANKS) -> np.ndarray:
    """(steps, ranks, microbatches, 3): a loss that falls and waves, a norm of another size on every rank."""
    random, shape = np.random.default_rng(seed), (steps, ranks, MICROBATCHES)
    time = np.linspace(0, 1, steps)[:, None, None]
    loss = 5 - 2 * time + 0.05 * np.sin(40 * time) + 0.1 * draw(random, shape)
    size = 1 + np.arange(ranks)[:, None] % 3
    norm = size * np.exp(np.clip(0.05 * draw(random, shape) - time, -60, 60))
    weight = random.integers(900, 1000, shape).astype(float)
    return np.stack([loss * weight, weight, norm * weight / (950 * ranks * MICROBATCHES)], axis=-1)


def suspects(watch: Statistics, steps: np.ndarray) -> list[int]:
    return [step for step, each in enumerate(steps) for _ in watch.look(each)]


def clean(noise: str, count: int, seed: int) -> int:
    """False suspects among `count` clean shard-steps."""
    watch, left, found = Statistics(range(RANKS)), count, 0
    while left > 0:
        found += len(suspects(watch, shards(NOISE[noise], 250, seed)))
        left, seed = left - 250 * RANKS * MICROBATCHES, seed + 1000
    return found


@pytest.mark.parametrize("noise", QUICK)
def test_of_a_million_clean_shard_steps_no_more_than_one_is_suspected_whatever_the_noise(noise):
    assert clean(noise, 1_000_000, QUICK.index(noise)) <= 1


@pytest.mark.slow
def test_ten_million_of_each_noise():
    found = {noise: clean(noise, 10_000_000, 100 + seed) for seed, noise in enumerate(NOISE)}
    assert max(found.values()) <= 10, found
    assert sum(found.values()) <= 0.5 * 10 * len(found), found


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_lies_far_off_is_seen_at_once_and_by_the_right_name(ranks):
    steps = shards(NOISE["normal"], 1000, 1, ranks)
    rank, place = ranks - 1, 3
    steps[800, rank, place, 0] += 3.0 * steps[800, rank, place, 1]  # a loss 30 deviations off
    steps[900, rank, place, 2] *= 8  # three bits of an exponent
    watch = Statistics(range(ranks))
    found = [(step, each) for step in range(1000) for each in watch.look(steps[step])]
    assert [(step, each.rank, each.microbatch, each.number) for step, each in found] == [
        (800, rank, place, "loss"),
        (900, rank, place, "gradient norm"),
    ]
    assert all(each.distance > each.limit for _, each in found)


def test_a_rank_that_contributes_nothing_is_seen():
    steps = shards(NOISE["normal"], 300, 2, 4)
    steps[299, 2, :, 2] = 0.0
    watch = Statistics(range(4))
    assert suspects(watch, steps[:299]) == []
    assert {(each.rank, each.number) for each in watch.look(steps[299])} == {(2, "gradient norm")}
    (alarm,) = watch.alarms(300)
    assert (alarm.action, alarm.fault.kind, alarm.fault.named, alarm.fault.rank) == ("tell", "statistics", False, None)
    assert [each["rank"] for each in alarm.fault.evidence["suspects"]] == [2] * MICROBATCHES
    assert watch.look(steps[100]) == [] and watch.alarms(301) == []


def test_what_happens_to_all_is_nobodys_fault():
    steps = shards(NOISE["normal"], 400, 3)
    steps[350:, :, :, 0] += 2.0 * steps[350:, :, :, 1]
    steps[380, :, :, 2] *= 100
    assert suspects(Statistics(range(RANKS)), steps) == []


def test_padding_unknown_norms_and_ranks_without_a_loss_do_not_count():
    """A pipeline of two, twice: ranks 2 and 3 have the head; norms are unknown in step 10; rank 3 has padding."""
    steps = shards(NOISE["normal"], 300, 4, 4)
    steps[:, :2, :, :2] = 0.0
    steps[:, 3, -1, :2] = 0.0
    steps[:, (1, 3), -1, 2] = 0.0
    steps[10, :, :, 2] = np.nan
    watch = Statistics([0, 1, 0, 1])
    assert suspects(watch, steps) == []
    assert watch._tails[0].count == 299 * (2 * MICROBATCHES - 1)
    assert watch._tails[1].count == 298 * (4 * MICROBATCHES - 2)


def test_nothing_is_suspected_at_first_and_a_suspect_does_not_blind_the_watch():
    steps = shards(NOISE["normal"], 300, 5, 4)
    for step in (20, 30, 200, 250):
        steps[step, 1, 1, 2] *= 1e6
    watch = Statistics(range(4))
    assert 31 * 4 * MICROBATCHES < statistics.FEWEST < 200 * 4 * MICROBATCHES
    assert suspects(watch, steps) == [200, 250]


def test_numbers_apart_add_up_to_those_of_all_ranks():
    parts = [apart([10.0 * rank + 1, 10.0 * rank + 2], rank, 3) for rank in range(3)]
    assert np.sum(parts, axis=0).tolist() == [1, 2, 11, 12, 21, 22]
