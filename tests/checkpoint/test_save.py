"""What a save writes: the state at the call, each tensor once, and nothing if a rank fails."""

import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.common import ROWS, assert_same, full_state, many, one, save_one, shard
from tests.dist import run_ranks
from truestep.checkpoint.catalogue import begin_epoch, list_committed, newest, read_manifest
from truestep.checkpoint.load import load, load_newest
from truestep.checkpoint.writer import block_size
from truestep.errors import CheckpointError
from truestep.storage.local import LocalStore


def _gated(store):
    """The background writer waits before it writes data, until the gate is opened."""
    arrived, gate = threading.Event(), threading.Event()

    def event(name):
        if name == "part assigned":
            arrived.set()
            assert gate.wait(30)

    store.event = event
    return arrived, gate


def test_c37_async_save_keeps_the_state_of_the_call(tmp_path):
    store = LocalStore(tmp_path)
    buffer = torch.ones(4)
    state = {"model.w": torch.tensor([1.0]), "model.low": buffer[:3], "model.high": buffer[1:]}
    extra = {"step": 7, "rng": {"dropout": [1, 2, 3]}, "loader": {"next_row": 70}}
    checkpointer = one(store)
    arrived, gate = _gated(store)
    save = checkpointer.save(7, state, extra, asynchronous=True)
    assert arrived.wait(30)
    state["model.w"].fill_(2.0)
    buffer.fill_(2.0)
    extra["step"] = 8
    extra["rng"]["dropout"][0] = 9
    extra["loader"]["next_row"] = 80
    gate.set()
    assert save.result().ok
    checkpointer.close()

    targets = {"model.w": torch.zeros(1), "model.low": torch.zeros(3), "model.high": torch.zeros(3)}
    loaded = load_newest(store, targets)
    assert loaded.step == 7
    assert loaded.extra == {"step": 7, "rng": {"dropout": [1, 2, 3]}, "loader": {"next_row": 70}}
    assert_same(targets, {"model.w": torch.ones(1), "model.low": torch.ones(3), "model.high": torch.ones(3)})


def test_c37_second_save_waits_for_the_staging_buffers(tmp_path):
    store = LocalStore(tmp_path)
    checkpointer = one(store)
    arrived, gate = _gated(store)
    checkpointer.save(1, {"model.w": torch.tensor([1.0])}, {}, asynchronous=True)
    assert arrived.wait(30)
    second = threading.Thread(
        target=checkpointer.save, args=(2, {"model.w": torch.tensor([2.0])}, {}), kwargs={"asynchronous": True}
    )
    second.start()
    second.join(0.2)  # not for the fault: only to give a wrong implementation the time to overwrite the buffer
    assert second.is_alive() and checkpointer.stage.buffers["model.w"].item() == 1.0
    gate.set()
    second.join(30)
    checkpointer.close()
    assert [result.step for result in checkpointer.finished() if result.ok] == [1, 2]
    for committed, value in zip(list_committed(store), (1.0, 2.0), strict=True):
        target = {"model.w": torch.zeros(1)}
        load(store, committed, target)
        assert target["model.w"].item() == value


def test_results_say_what_a_save_cost(tmp_path):
    store = LocalStore(tmp_path)
    checkpointer = one(store)
    state = full_state()
    checkpointer.save(1, state, {}, asynchronous=True)
    checkpointer.save(2, state, {}, asynchronous=False)
    checkpointer.wait()
    first, second = checkpointer.finished()
    assert first.num_bytes == second.num_bytes == sum(tensor.nbytes for tensor in state.values())
    assert 0 < first.stall_s <= first.total_s and 0 < second.stall_s == second.total_s
    assert first.commit == "commits/000000000001-000001" and len(first.manifest_sha256) == 64
    assert checkpointer.finished() == []
    checkpointer.close()


def test_c41_shared_tensors(tmp_path):
    store = LocalStore(tmp_path)
    tied = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    buffer = torch.arange(6.0).reshape(3, 2)
    state = {"embed.weight": tied, "head.weight": tied, "top": buffer[0:2], "bottom": buffer[1:3]}
    assert save_one(store, 1, state).ok
    manifest = read_manifest(store, newest(store))
    assert manifest.aliases == {"head.weight": "embed.weight"}
    assert set(manifest.tensors) == {"embed.weight", "top", "bottom"}

    new = torch.zeros(3, 2)
    targets = {"embed.weight": new, "head.weight": new, "top": torch.zeros(2, 2), "bottom": torch.zeros(2, 2)}
    load(store, newest(store), targets)
    assert_same(targets, state)
    targets["embed.weight"][0, 0] = 9.0
    assert targets["head.weight"][0, 0].item() == 9.0

    apart = {**targets, "head.weight": torch.zeros(3, 2)}
    with pytest.raises(
        CheckpointError, match=r"head.weight and embed.weight are one tensor in the checkpoint, but two here"
    ):
        load(store, newest(store), apart)
    load(store, newest(store), apart, strict=False)
    assert_same(apart, state)
    with pytest.raises(CheckpointError, match="tensors missing in the checkpoint: other"):
        load(store, newest(store), {**targets, "other": new})


def test_c41_tied_here_but_apart_in_the_checkpoint(tmp_path):
    store = LocalStore(tmp_path)
    assert save_one(store, 1, {"a": torch.ones(2), "b": torch.zeros(2)}).ok
    new = torch.full((2,), 7.0)
    with pytest.raises(CheckpointError, match="b and a are one tensor here, but two in the checkpoint"):
        load(store, newest(store), {"a": new, "b": new}, strict=False)
    assert torch.equal(new, torch.full((2,), 7.0))


def _tied(rank, world, path):
    """Rank 2 of 3 holds no row of the tied tensor, so it cannot tell that it is tied."""
    state = shard({"embed": torch.arange(4.0).reshape(2, 2)}, (world,), ROWS)
    state["head"] = state["embed"]
    checkpointer = many(LocalStore(path), rank, world)
    result = checkpointer.save(1, state, {}, asynchronous=True).result()
    checkpointer.close()
    return result


def test_c41_ties_with_empty_shards(tmp_path):
    store = LocalStore(tmp_path)
    begin_epoch(store)
    assert all(result.ok for result in run_ranks(_tied, 3, tmp_path))
    assert read_manifest(store, newest(store)).aliases == {"head": "embed"}


def _one_fails(rank, world, path):
    store = LocalStore(path)

    def event(name):
        if rank == 1 and name == "part assigned":
            raise OSError(28, "No space left on device")

    store.event = event
    checkpointer = many(store, rank, world, deadline_s=300.0)
    state = shard(full_state(), (world,), ROWS)
    failed = checkpointer.save(1, state, {}, asynchronous=True).result()
    store.event = lambda name: None
    again = checkpointer.save(2, state, {}, asynchronous=True).result()
    checkpointer.close()
    dist.barrier()
    return failed, again


def test_a_failing_rank_ends_the_save_for_all_at_once(tmp_path):
    """Long before the deadline; the next save is none the worse."""
    store = LocalStore(tmp_path)
    begin_epoch(store)
    for failed, again in run_ranks(_one_fails, 3, tmp_path):
        assert not failed.ok and "No space left on device" in failed.error and again.ok
        assert failed.total_s < 100
    assert [committed.step for committed in list_committed(store)] == [2]


def _one_is_silent(rank, world, path):
    checkpointer = many(LocalStore(path), rank, world, deadline_s=0.5)
    if rank == 0:
        result = checkpointer.save(1, {"model.w": torch.zeros(2)}, {}, asynchronous=True).result()
        checkpointer.close()
    dist.barrier()
    return result.error if rank == 0 else ""


def test_a_silent_rank_is_given_up_at_the_deadline(tmp_path):
    begin_epoch(LocalStore(tmp_path))
    assert "for longer than 0.5 s" in run_ranks(_one_is_silent, 2, tmp_path)[0]
    assert list_committed(LocalStore(tmp_path)) == []


@pytest.mark.parametrize(
    ("tensors", "extra", "sentence"),
    [
        ({"step": 3}, {}, "step is a int, not a tensor; put plain values into extra"),
        ({}, {"loss": float("nan")}, "extra cannot be stored"),
        ({}, {"rows": (1, 2)}, "extra would not come back as it was"),
        ({}, {"rows": {1: 2}}, "extra would not come back as it was"),
        ({}, {"object": object()}, "extra cannot be stored"),
    ],
)
def test_what_cannot_be_saved(tmp_path, tensors, extra, sentence):
    store = LocalStore(tmp_path)
    checkpointer = one(store)
    result = checkpointer.save(1, {"model.w": torch.zeros(1), **tensors}, extra, asynchronous=True).result()
    checkpointer.close()
    assert not result.ok and sentence in result.error and "\n" not in result.error
    assert store.list("steps") == [] and list_committed(store) == []


def _disagree(rank, world, path):
    checkpointer = many(LocalStore(path), rank, world)
    state = {"model.w": torch.zeros(2 + rank)}
    result = checkpointer.save(1, state, {}, asynchronous=False).result()
    checkpointer.close()
    dist.barrier()
    return result.error


def test_ranks_that_disagree_about_a_shape(tmp_path):
    begin_epoch(LocalStore(tmp_path))
    assert all("model.w: rank 1 has" in error for error in run_ranks(_disagree, 2, tmp_path))


def test_a_step_is_committed_once(tmp_path):
    store = LocalStore(tmp_path)
    checkpointer = one(store)
    assert checkpointer.save(1, {"w": torch.ones(1)}, {}, asynchronous=False).result().ok
    assert "exists already" in checkpointer.save(1, {"w": torch.zeros(1)}, {}, asynchronous=False).result().error
    checkpointer.close()
    target = {"w": torch.zeros(1)}
    load(store, newest(store), target)
    assert target["w"].item() == 1.0


def test_block_size():
    assert block_size(1, 8 << 20) == 64 << 10
    assert block_size(16 << 20, 8 << 20) == 256 << 10
    assert block_size(10 << 30, 8 << 20) == 8 << 20
    assert block_size(10 << 30, 1024) == 1024


ENDS = """
import sys, torch, torch.distributed as dist
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.storage.local import LocalStore
checkpointer = Checkpointer(
    LocalStore(sys.argv[1]), attempt=1, rank=0, world=2, kv=dist.HashStore(), block_bytes=1024, deadline_s=900.0
)
checkpointer.save(1, {"w": torch.ones(2)}, {}, asynchronous=True)
raise RuntimeError("training failed")
"""


def test_a_failing_process_ends_though_a_save_waits_for_others(tmp_path):
    done = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, timeout=300, check=False)
    assert done.returncode == 1 and b"training failed" in done.stderr
    assert LocalStore(tmp_path).list() == []


@pytest.mark.parametrize("cut", [0, 100])
def test_an_object_that_is_not_there_whole_is_not_committed(tmp_path, cut):
    """The store lost bytes after it had taken them: the coordinator looks before it commits."""
    store = LocalStore(tmp_path)

    def event(name):
        if name == "report sent":
            path = tmp_path / "steps/000000000001-000001-0001/rank-00000.bin"
            path.write_bytes(path.read_bytes()[:cut]) if cut else path.unlink()

    checkpointer = one(store)
    store.event = event
    result = checkpointer.save(1, full_state(), {}, asynchronous=True).result()
    checkpointer.close()
    assert not result.ok and f"{'holds 100 bytes' if cut else 'is not there'}, but" in result.error
    assert list_committed(store) == []
