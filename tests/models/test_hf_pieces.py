"""Model directories from and to any mesh: the same files from each, and each rank reads the part that it holds."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist import run_ranks
from tests.models.sections import VOCAB, small
from truestep.errors import ModelError
from truestep.models import hf, hf_pieces, hf_save
from truestep.models.build import build_model, init_weights
from truestep.models.hf import load_hf
from truestep.models.hf_save import save_hf
from truestep.models.load import load_model, tensors_of
from truestep.numerics.pieces import Split, piece_of, place, span

SECTION = small(tie_embeddings=True)
OWN = small().model_copy(update={"module": "somewhere:Own"})
NUM_EXPERTS = 5


def _state():
    model = build_model(SECTION, VOCAB).to_empty(device="cpu")
    init_weights(model, 5)
    return {name: tensor.detach() for name, tensor in tensors_of(model).items()}


def _part(tensor, split, size, rank):
    first, stop = split.span(tensor.shape[split.dim], size, rank)
    return tensor.narrow(split.dim, first, stop - first).clone()


def _dense(state, kind, rank, world):
    """What `rank` holds of whole tensors; of the last part of a pipeline also its copy of the tied table."""
    if kind == "whole":
        return {name: tensor.clone() for name, tensor in state.items()}
    if kind in ("fsdp", "hsdp"):
        mesh = init_device_mesh("cpu", (2, world // 2) if kind == "hsdp" else (1, world))
        return {
            name: distribute_tensor(tensor, mesh, (Replicate(), Shard(0)), src_data_rank=None)
            for name, tensor in state.items()
        }
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "tp"))
    outer, tp, held = mesh.get_local_rank("outer"), mesh.get_local_rank("tp"), {}
    for name, tensor in state.items():
        if kind == "pp x tp" and (name.startswith(("blocks.2", "norm")) != (outer == 1)) and name != "embed.weight":
            continue
        if tensor.dim() < 2:
            held[name] = piece_of(tensor.clone()).owned_if(tp == 0 and (kind == "pp x tp" or outer == 0))
            continue
        split = Split("tp", 1 if name.endswith((".out.weight", ".down.weight")) else 0)
        local = _part(tensor, split, 2, tp)
        if kind == "fsdp x tp":
            local = distribute_tensor(local, mesh["outer"], (Shard(0),), src_data_rank=None)
        placed = place(piece_of(local), split, 2, tp, tuple(tensor.shape))
        held[name] = placed.owned_if(kind == "fsdp x tp" or name != "embed.weight" or outer == 0)
    return held


def _blank(held):
    """Targets of the same layout that hold other values."""
    for value in held.values():
        piece_of(value).local.fill_(7.0)
    return held


def _files(directory):
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


KINDS = ["fsdp", "hsdp", "fsdp x tp", "pp x tp"]


def _save_and_load(rank, world, folder):
    state = _state()
    for kind in KINDS:
        size = save_hf(folder / kind, _dense(state, kind, rank, world), SECTION, shard_bytes=20_000)
        assert size == sum(tensor.nbytes for tensor in state.values())
    for kind in KINDS:
        held = _blank(_dense(state, kind, rank, world))
        load_hf(folder / "one", held, state.keys())
        for name, value in held.items():
            piece = piece_of(value)
            assert torch.equal(piece.local, state[name][piece.region]), (kind, name)
    with pytest.raises(ModelError, match="exists already"):
        save_hf(folder / "one", state, SECTION)


def test_directories_are_the_same_from_every_mesh(tmp_path: Path):
    save_hf(tmp_path / "one", _state(), SECTION, shard_bytes=20_000)
    run_ranks(_save_and_load, 4, tmp_path)
    want = _files(tmp_path / "one")
    assert sum(name.endswith(".safetensors") for name in want) > 3
    for kind in KINDS:
        assert _files(tmp_path / kind) == want, kind
    loaded = tensors_of(load_model(tmp_path / "pp x tp"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in _state().items())


def test_a_part_of_a_model_needs_the_names_of_the_whole(tmp_path: Path):
    """What a part alone wants does not tell a superfluous tensor from another part's."""
    state = _state()
    save_hf(tmp_path / "one", state, SECTION)
    first = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name.startswith("blocks.0")}
    with pytest.raises(ModelError, match=r"holds the tensor model\.embed_tokens\.weight"):
        load_hf(tmp_path / "one", first)
    load_hf(tmp_path / "one", first, state.keys())
    assert all(torch.equal(tensor, state[name]) for name, tensor in first.items())
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.9\.mlp\.up_proj"):
        load_hf(tmp_path / "one", first, [*state.keys(), "blocks.9.mlp.up.weight"])


def _expert_parts(name, section):
    """Experts are fused here and apart there; counts are nothing to Hugging Face."""
    if name == "counts":
        return []
    if name.startswith("experts."):
        kind = name.removeprefix("experts.")
        return [(f"experts.{i}.{kind}.weight", i) for i in range(NUM_EXPERTS)]
    return [(name, None)]


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(hf, "hf_parts", _expert_parts)
    monkeypatch.setattr(hf_pieces, "hf_parts", _expert_parts)


def _experts():
    made = torch.Generator().manual_seed(2)
    experts = {f"experts.{kind}": torch.randn(NUM_EXPERTS, 6, 4, generator=made) for kind in ("up", "down")}
    return experts | {"router": torch.randn(NUM_EXPERTS, 4, generator=made), "counts": torch.arange(5.0)}


def _expert_layout(state, kind, rank, world):
    """Experts over ep ranks, cut once more by FSDP2 along their own rows (or by experts) over edp."""
    if kind == "ep":
        parts = {name: state[name][slice(*span(NUM_EXPERTS, world, rank))].clone() for name in state if "." in name}
        held = {n: place(piece_of(p), Split("ep", 0), world, rank, tuple(state[n].shape)) for n, p in parts.items()}
    else:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("edp", "ep"))
        ep, held = mesh.get_local_rank("ep"), {}
        for name in ("experts.up", "experts.down"):
            local = _part(state[name], Split("ep", 0), 2, ep)
            dim = 0 if kind == "edp by expert x ep" else 1
            local = distribute_tensor(local, mesh["edp"], (Shard(dim),), src_data_rank=None)
            held[name] = place(piece_of(local), Split("ep", 0), 2, ep, tuple(state[name].shape))
    return held | {name: piece_of(state[name].clone()).owned_if(rank == 1) for name in ("router", "counts")}


def _save_and_load_experts(rank, world, folder):
    state, kinds = _experts(), ["ep", "edp x ep", "edp by expert x ep"]
    for kind in kinds:
        save_hf(folder / kind, _expert_layout(state, kind, rank, world), OWN)
    dist.barrier()
    for kind in kinds:
        held = _blank(_expert_layout(state, kind, rank, world))
        load_hf(folder / "one", held)
        for name, value in held.items():
            want = torch.zeros(5) if name == "counts" else state[name][value.region]
            assert torch.equal(value.local, want), (kind, name)
    return kinds


def test_fused_experts_from_and_to_every_mesh(tmp_path: Path, fused):
    state = _experts()
    save_hf(tmp_path / "one", state, OWN)
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert len(stored) == 2 * NUM_EXPERTS + 1
    assert torch.equal(stored["experts.3.down.weight"], state["experts.down"][3])
    for kind in run_ranks(_save_and_load_experts, 4, tmp_path)[0]:
        assert _files(tmp_path / kind) == _files(tmp_path / "one"), kind


def test_a_selection_bias_is_never_cast(tmp_path: Path):
    tensors = {"w": torch.ones(2), "gate.e_score_correction_bias": torch.tensor([1.0 + 2**-20])}
    assert save_hf(tmp_path / "model", tensors, OWN, dtype=torch.bfloat16) == 2 * 2 + 4
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored["w"].dtype == torch.bfloat16
    assert torch.equal(stored["gate.e_score_correction_bias"], tensors["gate.e_score_correction_bias"])


def _tied(rank, world, folder):
    """Rank 2 of 3 holds no row of the tied tensor, so it cannot tell that it is tied."""
    mesh = init_device_mesh("cpu", (world,))
    table = distribute_tensor(torch.arange(4.0).reshape(2, 2), mesh, (Shard(0),), src_data_rank=None)
    save_hf(folder / "tied", {"embed": table, "head": table}, OWN)
    again = distribute_tensor(torch.zeros(2, 2), mesh, (Shard(0),), src_data_rank=None)
    load_hf(folder / "tied", {"embed": again, "head": again})
    return again.full_tensor().tolist()


def test_c41_ties_with_empty_shards(tmp_path: Path):
    assert run_ranks(_tied, 3, tmp_path) == [[[0.0, 1.0], [2.0, 3.0]]] * 3
    assert list(load_file(tmp_path / "tied" / "model.safetensors")) == ["embed"]


def _disk_fills(rank, world, folder):
    """Rank 0 fails early; the others, which still send, hear of it and do not wait for ever."""
    if rank == 0:
        hf_save.save_file = _no_space
    with pytest.raises(ModelError, match=r"cannot be written: .*No space left"):
        save_hf(folder / "model", _dense(_state(), "fsdp", rank, world), SECTION, shard_bytes=5_000)


def _no_space(*_):
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_export_on_every_rank(tmp_path: Path):
    run_ranks(_disk_fills, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []
