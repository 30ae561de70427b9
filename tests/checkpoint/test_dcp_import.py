"""Plain DCP checkpoints of others load; hostile ones run nothing."""

import json
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.common import ROWS, assert_same, full_state, save_one, shard
from tests.dist import run_ranks
from truestep.checkpoint.dcp_import import import_dcp, names
from truestep.checkpoint.load import load_newest
from truestep.errors import CheckpointError
from truestep.storage.local import LocalStore


def _save(rank, world, path):
    state = {name: tensor for name, tensor in full_state(1).items() if tensor.numel()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**shard(state, (world,), ROWS), "step": 7}, checkpoint_id=path)


@pytest.fixture
def foreign(tmp_path):
    run_ranks(_save, 2, str(tmp_path / "dcp"))
    return tmp_path / "dcp"


def _target(seed=2):
    return {name: tensor for name, tensor in full_state(seed).items() if tensor.numel()}


def _load(rank, world, path):
    target = shard(_target(), (world,), ROWS)
    unwanted = import_dcp(path, target)
    assert_same(target, _target(1))
    return unwanted


def test_another_library_layout_loads_on_any_mesh(foreign):
    target = _target()
    assert import_dcp(foreign, target) == ["step"]
    assert_same(target, _target(1))
    assert run_ranks(_load, 3, foreign) == [["step"]] * 3
    assert names(foreign)["model.half"] == ((11, 6), "bfloat16") and names(foreign)["step"] is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model.norm": torch.zeros(6)}, r"model.norm is saved as float32 \[5\], but float32 \[6\] is wanted"),
        ({"model.norm": torch.zeros(5).half()}, r"model.norm is saved as float32 \[5\], but float16 \[5\] is wanted"),
        ({"model.more": torch.zeros(1)}, "holds no tensor model.more"),
        ({"step": torch.zeros(1)}, "holds no tensor step"),
    ],
)
def test_mismatches_are_named(foreign, change, sentence):
    target = _target()
    with pytest.raises(CheckpointError, match=sentence):
        import_dcp(foreign, {**target, **change})
    assert_same(target, _target())


def test_damaged_files_change_nothing(foreign):
    path = next(foreign.glob("__1_0.distcp"))
    path.write_bytes(path.read_bytes()[:100])
    target = _target()
    with pytest.raises(CheckpointError, match="cannot be read as a DCP checkpoint"):
        import_dcp(foreign, target)
    assert_same(target, _target())
    (foreign / ".metadata").write_bytes(b"\x80\x04junk")
    with pytest.raises(CheckpointError, match=r"\.metadata: refused"):
        import_dcp(foreign, target)
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read \(No such file"):
        import_dcp(foreign / "elsewhere", target)


class _Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_c89_a_hostile_metadata_pickle_runs_nothing(foreign, tmp_path):
    marker = tmp_path / "marker"
    (foreign / ".metadata").write_bytes(pickle.dumps(_Hostile(marker)))
    target = _target()
    with pytest.raises(CheckpointError, match=r"\.metadata: refused, because it names posix.system"):
        import_dcp(foreign, target)
    assert not marker.exists()
    assert_same(target, _target())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_c89_a_hostile_tensor_file_runs_nothing(foreign, tmp_path):
    marker = tmp_path / "marker"
    for path in foreign.glob("*.distcp"):
        content = pickle.dumps(_Hostile(marker))
        path.write_bytes(content + bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match="cannot be read as a DCP checkpoint"):
        import_dcp(foreign, _target())
    assert not marker.exists()


def test_c89_a_path_out_of_the_folder_is_refused(foreign):
    metadata = FileSystemReader(foreign).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../../etc/secret"
    (foreign / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"points to ../../etc/secret, outside its own folder"):
        import_dcp(foreign, _target())


def test_c89_a_class_cannot_be_changed(foreign):
    """BUILD on a class would set attributes on it for the whole process."""
    hostile = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x04evilK\x01s\x86b."
    (foreign / ".metadata").write_bytes(hostile)
    with pytest.raises(CheckpointError, match="tries to change a class"):
        import_dcp(foreign, _target())
    assert "evil" not in vars(dcp.metadata.Metadata)


def test_c89_our_own_format_has_no_pickle(tmp_path):
    """Every file of a checkpoint is raw tensor bytes or JSON; a pickle in its place is damage like any other."""
    store, marker = LocalStore(tmp_path / "store"), tmp_path / "marker"
    assert save_one(store, 1, full_state(1), {"rng": {"dropout": [1, 2]}, "loader": {"next_row": 3}}).ok
    for entry in store.list():
        path = store.root / entry.key
        good = path.read_bytes()
        if not entry.key.endswith(".bin"):
            json.loads(good)
        path.write_bytes(pickle.dumps(_Hostile(marker)))
        if entry.key not in ("probe/1.json", "commits/fence-000001"):  # of a fence only the name is looked at
            with pytest.raises(CheckpointError):
                load_newest(store, full_state(2))
        path.write_bytes(good)
    assert not marker.exists()
