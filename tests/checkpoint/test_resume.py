"""Optimizer state, second resumes, and states that do not belong to a rank."""

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.common import ROWS, assert_same, full_state, many, one, save_one, shard
from tests.dist import run_ranks
from truestep.checkpoint.catalogue import begin_epoch, list_committed, newest, read_manifest
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import Mismatch, load, load_newest
from truestep.errors import CheckpointError
from truestep.storage.local import LocalStore


def _adam(weights):
    return torch.optim.Adam(list(weights.values()), lr=1.0, betas=(0.9, 0.999), eps=0.0)


def _tensors(weights, adam):
    """Weights and optimizer state by name, complete from the first step on."""
    found = {f"model.{name}": weight for name, weight in weights.items()}
    for name, weight in weights.items():
        state = adam.state[weight]
        if not state:
            state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
        found |= {f"optim.{name}.{key}": value for key, value in state.items()}
    return found


def _step(weights, adam, gradient):
    """How far one update moves each weight."""
    before = {name: weight.item() for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.grad = torch.full((1,), gradient[name])
    adam.step()
    return {name: before[name] - weight.item() for name, weight in weights.items()}


def _new(names):
    weights = {name: torch.nn.Parameter(torch.zeros(1)) for name in names}
    return weights, _adam(weights)


@pytest.fixture
def trained(tmp_path):
    """Ten steps of gradient +1 on a and -1 on b, saved."""
    weights, adam = _new("ab")
    for _ in range(10):
        _step(weights, adam, {"a": 1.0, "b": -1.0})
    store = LocalStore(tmp_path)
    assert save_one(store, 10, _tensors(weights, adam)).ok
    return store


def test_c43_moments_and_step_count_come_back(trained):
    weights, adam = _new("ab")
    load_newest(trained, _tensors(weights, adam))
    assert weights["a"].item() == pytest.approx(-10.0, rel=1e-6)
    assert _step(weights, adam, {"a": -1.0, "b": -1.0})["a"] == pytest.approx(0.708535, abs=2e-6)


def test_c43_unbroken_step_is_one(trained):
    weights, adam = _new("ab")
    load_newest(trained, _tensors(weights, adam))
    assert _step(weights, adam, {"a": 1.0, "b": -1.0})["a"] == pytest.approx(1.0, abs=2e-6)


def test_c43_matched_by_name_not_by_position(trained):
    weights, adam = _new("ba")
    load_newest(trained, _tensors(weights, adam))
    assert adam.state[weights["a"]]["exp_avg"].item() > 0 > adam.state[weights["b"]]["exp_avg"].item()


def test_c43_no_optimizer_state_is_an_error_unless_weights_only(tmp_path, trained):
    weights, adam = _new("ab")
    store = LocalStore(tmp_path / "bare")
    assert save_one(store, 1, {"model.a": torch.ones(1), "model.b": torch.ones(1)}).ok
    with pytest.raises(CheckpointError, match=r"optimizer state missing in the checkpoint: optim.a.exp_avg"):
        load(store, newest(store), _tensors(weights, adam))
    assert weights["a"].item() == 0.0
    for each in (store, trained):
        loaded = load(each, newest(each), _tensors(weights, adam), weights_only=True)
        assert len(loaded.skipped) == 6 and all(name.startswith("optim.") for name in loaded.skipped)
        assert adam.state[weights["a"]]["step"].item() == 0.0 and weights["a"].item() != 0.0


def test_c44_saved_again_at_once_is_the_same(tmp_path):
    """Load and save again without a step between: same tensors, same cursor; nothing older comes back."""
    store = LocalStore(tmp_path)
    extra = {"loader": {"next_row": 8, "epoch": 0}, "rng": {"dropout": [3, 4]}}
    assert save_one(store, 2, full_state(5), extra).ok
    target = full_state(6)
    first = load_newest(store, target)
    checkpointer = one(store)
    assert checkpointer.save(first.step, target, first.extra, asynchronous=True).result().ok
    checkpointer.close()
    old, new = (read_manifest(store, committed) for committed in list_committed(store))
    assert new.extra == old.extra == extra
    digests = [[(n, c.blocks) for n, e in sorted(m.tensors.items()) for c in e.chunks] for m in (old, new)]
    assert digests[0] == digests[1]
    again = full_state(7)
    assert load_newest(store, again).commit == "commits/000000000002-000002"
    assert_same(again, full_state(5))


def _save_with_streams(rank, world, path):
    checkpointer = many(LocalStore(path), rank, world)
    extra = {"loader": {"next_row": 12}, "rng": {f"dropout.{i}": [i, 7] for i in range(4)}}
    result = checkpointer.save(2, shard(full_state(1), (world,), ROWS), extra, asynchronous=False).result()
    checkpointer.close()
    return result.ok


def _load_with_streams(rank, world, path):
    group = Group.of(dist.distributed_c10d._get_default_store(), rank, world, 20.0)
    return load_newest(LocalStore(path), shard(full_state(2), (world,), ROWS), group=group).extra


def test_c47_state_by_logical_stream_survives_another_world_size(tmp_path):
    """Cursor and streams are the run's, not a rank's: every rank of any world gets all of them."""
    begin_epoch(LocalStore(tmp_path))
    assert run_ranks(_save_with_streams, 4, tmp_path) == [True] * 4
    for extra in run_ranks(_load_with_streams, 2, tmp_path):
        assert extra["loader"] == {"next_row": 12}
        assert extra["rng"] == {f"dropout.{i}": [i, 7] for i in range(4)}


def test_a_whole_checkpoint_that_does_not_fit_is_no_reason_to_fall_back(tmp_path, caplog):
    store = LocalStore(tmp_path)
    assert save_one(store, 1, {"model.a": torch.ones(2)}).ok
    assert save_one(store, 2, {"model.a": torch.ones(3)}).ok
    target = {"model.a": torch.zeros(2)}
    with pytest.raises(Mismatch, match=r"model.a is saved as float32 \[3\], but float32 \[2\] is wanted"):
        load_newest(store, target)
    assert target["model.a"].tolist() == [0.0, 0.0] and caplog.text == ""


def _one_does_not_fit(rank, world, path):
    group = Group.of(dist.distributed_c10d._get_default_store(), rank, world, 20.0)
    with pytest.raises(Mismatch) as caught:
        load_newest(LocalStore(path), {"model.a": torch.zeros(2 + rank)}, group=group)
    dist.barrier()
    return str(caught.value)


def test_all_ranks_hear_of_a_mismatch_on_one(tmp_path):
    assert save_one(LocalStore(tmp_path), 1, {"model.a": torch.ones(2)}).ok
    first, second = run_ranks(_one_does_not_fit, 2, tmp_path)
    assert "because of rank 1" in first and "float32 [3] is wanted" in second
