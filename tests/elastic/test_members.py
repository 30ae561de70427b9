"""Members: whatever hosts do, a group is sound, as large as it may be, and on the hosts that failed least."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.elastic.budget import SAME_STEP, Budget
from truestep.elastic.members import Members
from truestep.elastic.worlds import Worlds
from truestep.errors import UserError
from truestep.recipe.load import load

from .. import small_run

HOUR_S = 3600.0


def members(fewest=1, most=8, unit=1, restarts=3, **more) -> Members:
    return Members(fewest, most, lambda world: world % unit == 0, Budget(restarts, HOUR_S), **more)


HOSTS = [f"h{number}" for number in range(6)]
EVENT = st.one_of(
    st.tuples(st.just("joined"), st.sampled_from(HOSTS), st.integers(1, 4), st.sampled_from("xyz")),
    st.tuples(st.sampled_from(["lost", "leaving", "quarantined", "failed"]), st.sampled_from(HOSTS)),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(EVENT, max_size=30),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_a_group_is_sound_after_any_history(history, fewest, more, unit, restarts):
    found = members(fewest, fewest + more, unit, restarts, usual=fewest + more)
    here: dict[str, int] = {}
    gone_bad, now_s = set(), 0.0
    for event in history:
        now_s += 10.0
        kind, name = event[0], event[1]
        if kind == "joined":
            found.joined(name, event[3], event[2])
            here[name] = event[2]
        elif kind == "lost":
            found.gone([name])
            here.pop(name, None)
        elif kind == "leaving":
            found.will_leave([name])
        elif kind == "quarantined":
            found.quarantine(name, "bits")
            gone_bad.add(name)
        else:
            found.budget.failed(name, now_s)
        refused = set(found.refused(now_s))
        assert gone_bad & here.keys() <= refused
        usable = sum(processes for host, processes in here.items() if host not in refused)
        sizes = [world for world in range(fewest, min(usable, fewest + more) + 1) if world % unit == 0]
        group = found.choose(now_s)
        if not sizes:
            assert group is None
            continue
        assert group is not None
        assert group.world == max(sizes)
        seats = {seat.host: seat.processes for seat in group.seats}
        assert len(seats) == len(group.seats) and not seats.keys() & refused
        assert all(0 < processes <= here[host] for host, processes in seats.items())
        ranks = [group.ranks_on(machine) for machine in group.machines]
        assert [rank for part in ranks for rank in part] == list(range(group.world))  # a machine's lie side by side
        idle = [host for host in found.idle(group) if host not in refused]
        worst = max(round(found.budget.score(host, now_s), 1) for host in seats)
        assert all(round(found.budget.score(host, now_s), 1) >= worst for host in idle)


def test_the_first_hosts_that_came_keep_their_ranks():
    found = members(most=3)
    for name in "abcd":
        found.joined(name, "here", 1)
    group = found.choose(0.0)
    assert group is not None and group.hosts == ["a", "b", "c"] and found.idle(group) == ["d"]


def test_a_spare_takes_the_place_of_a_host_that_failed_and_is_replaced_by_it_in_turn():
    found = members(most=3)
    for name in "abcd":
        found.joined(name, "here", 1)
    found.budget.failed("b", 0.0)
    group = found.choose(1.0)
    assert group is not None and group.hosts == ["a", "c", "d"] and found.idle(group) == ["b"]
    found.budget.failed("d", 2.0)
    found.budget.failed("d", 3.0)
    group = found.choose(4.0)
    assert group is not None and group.hosts == ["a", "b", "c"]


def test_spares_keep_the_usual_size_and_do_not_make_it_grow():
    found = members(fewest=1, most=16, usual=4, spares=1)
    found.joined("here", "here", 5)
    first = found.choose(0.0)
    assert first is not None and first.world == 4
    found.joined("there", "there", 4)
    grown = found.choose(0.0)
    assert grown is not None and grown.world == 8
    found.started(grown)
    found.gone(["there"])
    found.joined("there", "there", 3)
    kept = found.choose(0.0)
    assert kept is not None and kept.world == 8  # the spare is used, since 8 is usual now


def test_failures_are_forgotten_by_half():
    budget = Budget(restarts=3, forget_s=HOUR_S)
    for _ in range(4):
        budget.failed("a", 0.0)
    assert budget.spent("a", 60.0) and budget.run_spent(1, 60.0) and not budget.run_spent(2, 60.0)
    assert budget.score("a", HOUR_S) == pytest.approx(2.0)
    assert not budget.spent("a", HOUR_S)


def test_a_failure_that_nobody_can_be_blamed_for_is_borne_by_the_run_alone():
    budget = Budget(restarts=0, forget_s=HOUR_S)
    budget.failed(None, 0.0)
    assert budget.run_spent(1, 0.0) and not budget.spent("a", 0.0)


def test_only_failures_in_a_row_at_one_step_count_as_stuck():
    budget = Budget(restarts=9, forget_s=HOUR_S)
    for step in (4, 4, 5, 4):
        budget.failed_at(step, f"at {step}")
        assert not budget.stuck
    for number in range(SAME_STEP):
        budget.failed_at(7, f"time {number}")
    assert budget.stuck and budget.series.text == "time 0"


def test_the_budget_outlives_the_supervisor(tmp_path):
    budget, file = Budget(2, HOUR_S), tmp_path / "elastic" / "state.json"
    for _ in range(3):
        budget.failed("a", 100.0)
    budget.quarantined["b"] = "flipped bits"
    budget.failed_at(3, "boom")
    budget.save(file)
    again = Budget.load(file, 2, HOUR_S)
    assert again == budget and again.spent("a", 100.0)
    again.once_more()
    assert not again.spent("a", 100.0) and again.quarantined == {"b": "flipped bits"}
    again.failed("a", 100.0)
    assert again.spent("a", 100.0)  # one chance, not a new budget


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 1, "hosts": {"a": {"v": 1}}}'])
def test_a_damaged_budget_is_said_with_its_remedy(tmp_path, text):
    file = tmp_path / "state.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"state\.json is damaged .*delete it"):
        Budget.load(file, 3, HOUR_S)


def recipe_of(tmp_path, mesh, **changes):
    body = small_run.recipe(tmp_path)
    return load(small_run.with_machine(body, mesh=mesh, **changes))


def test_worlds_are_those_that_the_mesh_allows(tmp_path):
    """12 rows a step, one a microbatch: more than 12 groups win nothing."""
    worlds = Worlds(recipe_of(tmp_path, {"tp": 2}), begun=2)
    assert [world for world in range(1, 40) if worlds.fit(world)] == list(range(2, 25, 2))


def test_a_mesh_without_an_open_axis_has_one_world(tmp_path):
    worlds = Worlds(recipe_of(tmp_path, {"dp_replicate": 2, "dp_shard": 2}), begun=4)
    assert [world for world in range(1, 40) if worlds.fit(world)] == [4]


def test_what_was_asked_for_is_taken_even_with_padding(tmp_path):
    worlds = Worlds(recipe_of(tmp_path, {}, microbatch_rows=6), begun=5)
    assert [world for world in range(1, 40) if worlds.fit(world)] == [1, 2, 3, 4, 5]
