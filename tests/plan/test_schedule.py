"""Case C86: idle time and microbatches in flight of pipeline schedules, against the orders that torch runs."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from tests.plan.simulation import Work, orders_of_ours, simulate
from truestep.parallel.schedule import orders
from truestep.plan.schedule import FORMULAS, bubble, in_flight, microbatches

CLASSES = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
TIMES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def test_c86e_bubble_and_microbatches_in_flight():
    assert bubble("1f1b", 4, 1, 8) == pytest.approx((4 - 1) / (8 + 3)) == pytest.approx(0.272727, abs=1e-6)
    assert [in_flight("1f1b", 4, 1, 8, rank) for rank in range(4)] == [4, 3, 2, 1]


def test_published_bubbles():
    """Of m(F+B): (p-1)/m, interleaved (p-1)/(v m) (arXiv 2104.04473), and DeepSeek-V3's table 2 with PP = 2P stages."""
    for schedule, v, ideal in [("1f1b", 1, 7 / 32), ("interleaved", 4, 7 / (4 * 32))]:
        share = bubble(schedule, 8, v, 32)
        assert share / (1 - share) == pytest.approx(ideal)
    share = bubble("dualpipev", 8, 2, 32)
    assert share / (1 - share) * 2 * 32 * 3 == pytest.approx((16 / 2 - 1) * (3 + 2 - 3))
    assert bubble("1f1b", 1, 1, 8) == bubble("zbv", 1, 2, 8) == 0


def _stage(index: int, stages: int, pp: int) -> Any:
    stage = MagicMock(spec=_PipelineStageBase)
    stage.group_size, stage.group_rank, stage.num_stages, stage.stage_index = pp, 0, stages, index
    stage.device, stage.has_backward, stage.submod, stage.group = torch.device("cpu"), True, MagicMock(), MagicMock()
    stage.is_first, stage.is_last = index == 0, index == stages - 1
    return stage


def _orders(schedule: str, pp: int, v: int, count: int) -> list[list[Work]]:
    """What torch's schedule does on each rank."""
    held = [0, 2 * pp - 1] if schedule in ("zbv", "dualpipev") else range(0, pp * v, pp)
    made: Any = CLASSES[schedule]([_stage(i, pp * v, pp) for i in held], count, loss_fn=lambda *_: None)
    rows = []
    for rank in range(pp):
        actions = [part for a in made.pipeline_order[rank] if a is not None for part in (a.sub_actions or (a,))]
        rows.append([Work(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in actions])
    return rows


SHAPES = [(2, 2, 4), (4, 2, 8), (4, 2, 16), (4, 3, 12), (8, 2, 32)]


@pytest.mark.parametrize("pp, v, count", SHAPES)
@pytest.mark.parametrize("schedule", CLASSES)
def test_in_flight_is_what_torchs_orders_hold(schedule, pp, v, count):
    v = 2 if schedule in ("zbv", "dualpipev") else v
    held = simulate(_orders(schedule, pp, v, count), TIMES, pp * v).in_flight
    assert held == [in_flight(schedule, pp, v, count, rank) for rank in range(pp)]


@pytest.mark.parametrize("pp, v, count", SHAPES)
@pytest.mark.parametrize("schedule", CLASSES)
def test_bubbles_of_torchs_orders(schedule, pp, v, count):
    v = 2 if schedule in ("zbv", "dualpipev") else v
    idle = simulate(_orders(schedule, pp, v, count), TIMES, pp * v).idle
    formula = bubble(schedule, pp, v, count)
    if schedule == "dualpipev":  # published for pairs of F and B that end together; torch's may end one by one
        assert formula / 2 < idle <= formula
    else:
        assert idle == pytest.approx(formula)


@given(st.integers(2, 6), st.integers(1, 12))
def test_the_simulation_of_1f1b_is_its_formula(pp, count):
    seen = simulate(orders_of_ours("1f1b", pp, 1, count), {"F": 1.0, "B": 2.0}, pp)
    assert seen.idle == pytest.approx(bubble("1f1b", pp, 1, count)) and seen.end == 3 * (count + pp - 1)
    assert seen.in_flight == [in_flight("1f1b", pp, 1, count, rank) for rank in range(pp)]


def test_orders_that_block_are_found():
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([[Work("B", 0, 0), Work("F", 0, 0)]], TIMES, 1)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted({*CLASSES, "1f1b", "gpipe"})), st.integers(2, 5), st.integers(1, 20))
def test_padded_counts_are_those_that_torch_takes(schedule, pp, wanted):
    count = microbatches(schedule, pp, wanted)
    assert count >= wanted and microbatches(schedule, pp, count) == count
    assert set(FORMULAS) == {*CLASSES, "1f1b", "gpipe"}
    if schedule in CLASSES:
        _orders(schedule, pp, 2, count)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted({*CLASSES, "1f1b", "gpipe"})), st.integers(2, 5), st.integers(1, 20))
def test_counts_and_microbatches_in_flight_are_those_of_the_runner(schedule, pp, wanted):
    per_rank = 1 if schedule in ("1f1b", "gpipe") else 2
    count = microbatches(schedule, pp, wanted)
    assert count == orders(schedule, pp, per_rank, wanted)[0].num_microbatches
    held = simulate(orders_of_ours(schedule, pp, per_rank, count), TIMES, pp * per_rank).in_flight
    planned = [in_flight(schedule, pp, per_rank, count, rank) for rank in range(pp)]
    if schedule == "zbv" and count < 2 * pp:
        assert all(a <= b for a, b in zip(held, planned)) and max(held) == max(planned)
    else:
        assert held == planned
