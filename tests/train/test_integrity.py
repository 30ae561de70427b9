"""Silent corruption on real ranks: each fault is found in the step in which it happens, and whoever did it is named, or
honestly nobody; without faults there is no alarm and no changed bit."""

import math
from dataclasses import replace

import pytest

from tests import tiny
from tests.pool import Pool
from tests.train import sdc
from truestep.recipe.sentinel import Sentinel
from truestep.sentinel.inject import Flip
from truestep.train.integrity import Integrity, sampled
from truestep.train.step import train_step

STEP = 2
SLOW = pytest.mark.slow
K = "blocks.0.attention.k.weight"


@pytest.fixture(scope="module")
def pool():
    with Pool(4) as ranks:
        yield ranks


def told(pool, name: str, *flips: Flip, settings: Sentinel = sdc.ALL, steps: int = 2) -> sdc.Told:
    """Of rank 0, after a look at whether all ranks say the same."""
    setting = sdc.SETTINGS[name]
    found = pool.run(sdc.trial, setting.world, setting, list(flips), settings, steps)
    assert all(one.faults == found[0].faults for one in found)
    return found[0]


def only(found: sdc.Told):
    (fault,) = found.faults
    assert found.struck and fault.step == STEP
    return fault


def flip(site: str, rank: int | None = 1, **more) -> Flip:
    tensor = {"optimizer": f"{K}.exp_avg", "activation": 1, "collective": 0}.get(site, K)
    return replace(Flip(site, STEP, rank, tensor=tensor, element=7, bit=20), **more)


@pytest.mark.parametrize(
    "name",
    ["one", "ddp 2", "hsdp 4", "exact fsdp 3", "tp 2", "pp 2"]
    + [
        pytest.param(name, marks=SLOW) for name in ("ddp 3", "fsdp 3", "exact ddp 3", "exact one", "cp 2", "exact pp 2")
    ],
)
def test_a_clean_run_has_no_alarm_and_the_bits_of_one_that_nobody_looks_at(pool, name):
    watched = told(pool, name)
    assert not watched.faults and len(watched.losses) == 2
    plain = told(pool, name, settings=sdc.OFF)
    assert (watched.losses, watched.weights) == (plain.losses, plain.weights)


@SLOW
def test_looking_at_experts_and_low_compute_changes_nothing(pool):
    moe = {
        "num_experts": 4,
        "top_k": 2,
        "expert_size": 16,
        "balance": "aux",
        "counts": "previous",
    }  # the counts are state
    for setting in (
        replace(sdc.SETTINGS["fsdp 3"], model={"moe": moe}),
        replace(sdc.SETTINGS["fsdp 3"], precision="bfloat16"),
    ):
        on, off = (pool.run(sdc.trial, 3, setting, [], how, 3)[0] for how in (sdc.ALL, sdc.OFF))
        assert not on.faults and (on.losses, on.weights) == (off.losses, off.weights)


@pytest.mark.parametrize("name", ["one", "fsdp 3", pytest.param("tp 2", marks=SLOW), pytest.param("pp 2", marks=SLOW)])
@pytest.mark.parametrize("site", ["state", "optimizer"])
def test_memory_at_rest_names_its_rank_its_host_and_the_tensor(pool, name, site):
    rank = 0 if name == "one" else 1
    fault = only(told(pool, name, flip(site, rank, bit=0)))
    assert (fault.kind, fault.named, fault.rank, fault.host) == ("state", True, rank, f"host{rank}")
    assert fault.since == STEP - 1  # what a checkpoint of the step before may have saved
    assert fault.evidence["tensor"].startswith("model." if site == "state" else "optim.")


@pytest.mark.parametrize(
    "name",
    ["one", "ddp 2", "exact fsdp 3", *(pytest.param(n, marks=SLOW) for n in ("fsdp 3", "hsdp 4", "exact ddp 3"))],
)
@pytest.mark.parametrize("site", ["activation", "gradient"])
def test_a_wrong_computation_is_named_by_two_others_or_by_its_own_repetition(pool, name, site):
    rank = 0 if name == "one" else 1
    fault = only(told(pool, name, flip(site, rank)))
    assert (fault.kind, fault.named, fault.rank, fault.since) == ("replay", True, rank, STEP)
    assert not fault.evidence["repeatable"]
    if site == "gradient":
        assert fault.evidence["tensor"] == f"the gradient of {K}"


@pytest.mark.parametrize("site", ["activation", "gradient"])
def test_one_that_is_always_wrong_needs_a_third_to_be_named(pool, site):
    fault = only(told(pool, "fsdp 3", flip(site, sticky=True)))
    assert (fault.kind, fault.named, fault.rank, fault.since) == ("replay", True, 1, STEP)
    assert fault.evidence["repeatable"]
    fault = only(told(pool, "ddp 2", flip(site, sticky=True)))
    assert (fault.named, fault.rank, fault.host) == (False, None, None)
    assert fault.evidence["ranks"] == [0, 1]


@pytest.mark.parametrize("name", ["pp 2", pytest.param("tp 2", marks=SLOW), pytest.param("cp 2", marks=SLOW)])
def test_ranks_that_compute_on_each_others_results_are_not_told_apart(pool, name):
    row_4 = 16 * 32  # row 3 has no targets, so that nothing depends on it
    fault = only(told(pool, name, flip("activation", element=row_4)))
    assert fault.kind == "replay" and not fault.named
    assert 1 in fault.evidence["ranks"] and len(fault.evidence["ranks"]) == 2
    fault = only(told(pool, name, flip("gradient")))  # which nobody else computes on
    assert (fault.named, fault.rank) == (True, 1)


@pytest.mark.parametrize("name", ["ddp 3", pytest.param("exact fsdp 3", marks=SLOW)])
def test_a_gradient_that_changes_between_its_reduction_and_its_use(pool, name):
    fault = only(told(pool, name, flip("reduced", bit=0)))
    assert (fault.kind, fault.named, fault.rank, fault.since) == ("state", True, 1, STEP)
    fault = only(told(pool, name, flip("reduced", None, bit=0)))
    assert (fault.kind, fault.named, fault.evidence["ranks"]) == ("state", False, [0, 1, 2])


def test_native_collectives(pool):
    fault = only(told(pool, "ddp 3", flip("collective")))
    assert (fault.kind, fault.named, fault.rank) == ("collective", True, 1)
    gathered = told(pool, "fsdp 3", flip("collective", bit=0)).faults[0]
    assert (gathered.kind, gathered.named, gathered.rank) == ("collective", True, 1)
    assert "all-gather" in gathered.text and gathered.evidence["giver"] == 0


@pytest.mark.parametrize("bit", [0, 40])
def test_exact_collectives_are_computed_again_and_located(pool, bit):
    quiet = sdc.ALL.model_copy(update={"replay_share": 0.0})
    hit = told(pool, "exact ddp 3", flip("collective", bit=bit), settings=quiet)
    fault = only(hit)
    assert (fault.kind, fault.named, fault.rank) == ("collective", True, 1)
    assert fault.since == STEP + 1  # nothing that was kept is wrong
    assert hit.weights == told(pool, "exact ddp 3", settings=sdc.OFF).weights
    fault = only(told(pool, "exact ddp 3", flip("collective", bit=bit, sticky=True), settings=quiet))
    assert (fault.named, fault.rank, fault.since) == (True, 1, STEP)


@pytest.mark.parametrize(
    ("name", "named"), [("ddp 3", True), ("ddp 2", False), pytest.param("hsdp 4", False, marks=SLOW)]
)
def test_c53_replicas_that_drifted_are_found_at_the_next_sweep(pool, name, named):
    """A bit of rank 1 flips before step 3; copies are compared at steps 2 and 4."""
    settings = Sentinel(digest_share=0.0, sweep_every=2, replay_share=0.0)
    found = told(pool, name, flip("state", step=3, bit=22), settings=settings, steps=4)
    (fault,) = found.faults
    assert (fault.kind, fault.step, fault.since, fault.named) == ("replica", 4, 3, named)
    assert fault.rank == (1 if named else None)
    assert fault.evidence["tensor"] == f"model.{K}"
    assert named or 1 in fault.evidence["ranks"]


def test_sampled_digests_have_looked_at_everything_after_a_whole_turn(pool):
    """With a quarter of the state each time, a bit that flips in four steps in a row is found in one of them."""
    settings = Sentinel(digest_share=0.25, sweep_every=0, replay_share=0.0)
    for element in (0, 40):
        flips = [Flip("state", step, 1, tensor=K, element=element, bit=1) for step in range(2, 6)]
        found = told(pool, "ddp 2", *flips, settings=settings, steps=6)
        assert found.faults and found.faults[0].rank == 1


def test_samples_are_the_same_whoever_draws_them():
    assert sum(sampled(3, "recompute", step, 0.05) for step in range(4000)) == pytest.approx(200, rel=0.2)
    assert [sampled(3, "x", step, 0.5) for step in range(9)] == [sampled(3, "x", step, 0.5) for step in range(9)]
    assert all(sampled(1, "x", step, 1.0) for step in range(50)) and not sampled(1, "x", 1, 0.0)


@pytest.mark.parametrize("name", ["one", "ddp 3", "exact ddp 3", "pp 2"])
def test_c51_a_nan_that_does_not_come_again_is_no_fault_of_the_data(pool, name):
    """Nothing else is looked at. The forward passes of a step before are over."""
    setting, last = sdc.SETTINGS[name], sdc.SETTINGS[name].world - 1
    first = {"one": 6, "ddp 3": 2, "exact ddp 3": 4, "pp 2": 2}[name]  # exact computes its first step twice
    for passes, alarm in (((first,), True), (range(first, 999), False)):
        found = pool.run(sdc.trial, setting.world, setting, [], sdc.OFF, 2, passes)[0]
        if alarm:
            (fault,) = found.faults
            assert (fault.kind, fault.step, fault.since) == ("replay", STEP, STEP)
            assert last in fault.evidence["ranks"] and fault.named == (name != "pp 2")
        else:
            assert not found.faults and math.isnan(found.losses[-1])


def test_an_overflow_that_does_not_come_again_is_told_and_leaves_no_trace(pool):
    quiet = sdc.ALL.model_copy(update={"replay_share": 0.0})
    hit = told(pool, "exact ddp 3", flip("gradient", bit=30, element=8), settings=quiet)
    fault = only(hit)
    assert (fault.kind, fault.named, fault.since) == ("replay", False, STEP + 1)
    assert hit.weights == told(pool, "exact ddp 3", settings=sdc.OFF).weights


def test_a_suspicion_has_the_step_after_next_computed_again():
    setting = sdc.SETTINGS["one"]
    training = sdc.start(0, 1, setting)
    training.guard = guard = Integrity(training, sdc.OFF, "tiny")
    armed = []
    for number, batch in enumerate(tiny.rows(5)):
        train_step(training, tiny.share(batch, 0, 1, setting.rows), batch.num_targets, [])
        armed.append(guard.armed)
        if number == 1:
            guard.suspect()
    assert armed == [False, False, False, True, False]
