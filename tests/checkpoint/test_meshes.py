"""A training state goes from mesh to mesh through checkpoints and model directories, and no bit changes."""

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.common import many, save_one
from tests.dist import run_ranks
from tests.tiny import job, section, state
from truestep.checkpoint.catalogue import begin_epoch
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import load_newest
from truestep.models.decoder import Decoder
from truestep.models.hf import load_hf
from truestep.models.hf_save import save_hf
from truestep.models.load import tensors_of
from truestep.numerics.digest import state_digest
from truestep.recipe.machine import Mesh
from truestep.storage.local import LocalStore

DENSE = [
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "pp": 2},
    {"dp_replicate": 2, "tp": 2},
    {"pp": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
]
EXPERTS = [{"dp_shard": 4, "ep": 4}, {"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}]
EXPERTS += [{"dp_shard": 2, "tp": 2, "ep": 4}, {"dp_shard": 2, "pp": 2, "ep": 2}]
MOE = {"num_experts": 4, "top_k": 2, "expert_size": 24}


def _model(options):
    with torch.device("meta"):
        return Decoder(section(**options))


def _from_mesh_to_mesh(rank, world, folder, meshes, options):
    """On every mesh: fresh weights, saved and exported; then what the mesh before had saved, and the export of one."""
    digests, sizes = [], []
    kv = dist.distributed_c10d._get_default_store()
    for index, degrees in enumerate(meshes):
        mesh = Mesh(**({"dp_replicate": 1, "dp_shard": 1} | degrees))
        training = state(job(rank, world), mesh=mesh, model=_model(options))
        held = training.tensors()
        digests.append(state_digest(held))
        checkpointer = many(LocalStore(folder / f"{index}"), rank, world)
        result = checkpointer.save(1, held, {}, asynchronous=True).result()
        assert result.ok, result.error
        sizes.append(result.num_bytes)
        checkpointer.close()
        save_hf(folder / f"{index}-hf", training.parallel.pieces(), section(**options))
        with torch.no_grad():
            for piece in held.values():
                piece.local.fill_(7)
        source = folder / ("one" if index == 0 else f"{index - 1}")
        load_newest(LocalStore(source), held, group=Group.of(kv, rank, world, 20.0))
        digests.append(state_digest(held))
        weights = training.parallel.pieces()
        for piece in weights.values():
            piece.local.detach().fill_(7)
        load_hf(folder / "one-hf", weights, list(tensors_of(_model(options))))
        digests.append(state_digest(held))
    return digests, sizes


@pytest.mark.parametrize(
    ("meshes", "options"),
    [(DENSE, {}), (DENSE[3:6:2], {"tie_embeddings": True}), (EXPERTS, {"family": "mixtral", "moe": MOE})],
    ids=["dense", "tied", "experts"],
)
def test_from_mesh_to_mesh(tmp_path, meshes, options):
    training = state(job(), model=_model(options))
    held = training.tensors()
    digest, size = state_digest(held), sum(piece.local.nbytes for piece in held.values())
    assert save_one(LocalStore(tmp_path / "one"), 1, held).ok
    save_hf(tmp_path / "one-hf", training.parallel.pieces(), section(**options))
    for index in range(len(meshes)):
        begin_epoch(LocalStore(tmp_path / f"{index}"))
    for digests, sizes in run_ranks(_from_mesh_to_mesh, 4, tmp_path, meshes, options, timeout_s=120):
        assert set(digests) == {digest} and set(sizes) == {size}
    want = {file.name: file.read_bytes() for file in (tmp_path / "one-hf").iterdir()}
    for index, mesh in enumerate(meshes):
        found = {file.name: file.read_bytes() for file in (tmp_path / f"{index}-hf").iterdir()}
        assert found == want, mesh
