"""Exposed communication: from events with known times, and from steps on two ranks."""

import pytest

from tests import tiny
from tests.dist import run_ranks
from truestep.train.profile import STEP, Exposure, StepProfiler, overlap, timeline
from truestep.train.step import train_step


def event(category, name, begin, end, thread=1, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": thread, "args": args}


def test_exposed_is_what_no_kernel_covers():
    """Two steps of 100 us. NCCL takes 10-40 and 60-80 of the first, kernels 20-70; of the second 130-140, uncovered."""
    tensor = {"Process Group Description": "tp"}
    events = [
        event("user_annotation", STEP, 0, 100),
        event("user_annotation", STEP, 100, 200),
        event("gpu_user_annotation", STEP, 0, 100),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 10, 40, 7, **{"Process Group Description": "dense"}),
        event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32", 60, 80, 7, **tensor),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 130, 140, 7, **tensor),
        event("kernel", "gemm", 20, 50, 8),
        event("kernel", "gemm", 50, 70, 8),
        event("gpu_memcpy", "Memcpy HtoD", 0, 200, 8),
        event("cpu_op", "aten::mm", 0, 200),
        {"ph": "M", "name": "process_name"},
    ]
    found = overlap(timeline(events))
    assert found.steps == 2 and found.step_s == pytest.approx(100e-6) and found.compute_s == pytest.approx(25e-6)
    assert found.all == Exposure(pytest.approx(30e-6), pytest.approx(15e-6))
    assert found.groups["dense"] == Exposure(pytest.approx(15e-6), pytest.approx(5e-6))
    assert found.groups["tp"] == Exposure(pytest.approx(15e-6), pytest.approx(10e-6))


def test_on_a_cpu_operators_of_the_training_thread_compute():
    events = [
        event("user_annotation", STEP, 0, 100),
        event("user_annotation", "gloo:all_reduce", 10, 50, 2),
        event("cpu_op", "aten::linear", 20, 30),
        event("cpu_op", "aten::mm", 22, 28),
        event("cpu_op", "c10d::allreduce_", 10, 50),
        event("cpu_op", "autograd::engine::evaluate_function: _GatherBackward", 0, 100),
        event("cpu_op", "_GatherBackward", 0, 100),
        event("cpu_op", "aten::copy_", 10, 50, 2),
    ]
    found = overlap(timeline(events))
    assert found.compute_s == pytest.approx(10e-6)
    assert found.all == Exposure(pytest.approx(40e-6), pytest.approx(30e-6))


def _profiled(rank, world):
    training = tiny.state(tiny.job(rank, world))
    profiler = StepProfiler(2, training.job.device)
    batch = tiny.rows()[0]
    steps = 0
    while not profiler.finished:
        with profiler.step():
            train_step(training, tiny.share(batch, rank, world, 6), batch.num_targets, [])
        steps += 1
    return steps, profiler.close()


def test_steps_on_two_ranks():
    for steps, found in run_ranks(_profiled, 2):
        assert steps == 3 and found.steps == 2
        assert {"all_gather", "reduce_scatter", "all_reduce"} & found.groups.keys()
        assert 0 < found.all.exposed_s <= found.all.communication_s <= found.step_s
        assert 0 < found.compute_s < found.step_s


def test_training_that_ends_early_gives_what_there_is():
    training, batch = tiny.state(tiny.job()), tiny.rows()[0]
    found = []
    for steps in (1, 2):
        profiler = StepProfiler(5, training.job.device)
        for _ in range(steps):
            with profiler.step():
                train_step(training, [batch], batch.num_targets, [])
        assert not profiler.finished
        found.append(profiler.close())
    assert found[0] is None and found[1].steps == 1 and found[1].all == Exposure()
