"""Pieces know their place on every layout, and whole tensors come out of them bit for bit, one at a time."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.dist import run_ranks
from truestep.numerics import pieces as module
from truestep.numerics.boxes import cover_problem
from truestep.numerics.pieces import Piece, Split, find_aliases, natural, piece_of, place, span, stream_whole

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.int64, torch.float64]


@given(n=st.integers(0, 40), size=st.integers(1, 9))
def test_spans_tile_and_are_balanced(n, size):
    spans = [span(n, size, rank) for rank in range(size)]
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(n))
    lengths = [stop - start for start, stop in spans]
    assert max(lengths) - min(lengths) <= 1


def test_units_stay_together():
    assert [Split("tp", 0, 4).span(12, 2, rank) for rank in range(2)] == [(0, 4), (4, 12)]
    with pytest.raises(ValueError, match="13 indices cannot be cut in units of 4"):
        Split("tp", 0, 4).span(13, 2, 0)


def test_a_part_of_another_shape_has_no_place():
    with pytest.raises(ValueError, match=r"shape \[3, 2\] was given; 0 of 2 holds \[2, 2\]"):
        place(piece_of(torch.zeros(3, 2)), Split("tp", 0), 2, 0, (4, 2))


def test_natural_order():
    names = ["blocks.10.up", "head", "blocks.9.up", "embed", "blocks.9.down", "2"]
    assert sorted(names, key=natural) == ["2", "blocks.9.down", "blocks.9.up", "blocks.10.up", "embed", "head"]


def test_only_the_same_view_of_the_same_part_is_an_alias():
    x = torch.zeros(4, 2)
    pieces = {"a": piece_of(x), "top": piece_of(x[:2]), "turned": piece_of(x.t()), "b": piece_of(x.view(4, 2))}
    pieces |= {"low": Piece(x, (8, 2), (0, 0)), "high": Piece(x, (8, 2), (4, 0)), "none": piece_of(x[:0])}
    assert find_aliases(pieces) == {"b": "a"}


def _whole(shape, dtype=torch.float32, seed=0):
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def _held(piece, whole):
    """A piece is the part of the whole that it says it is."""
    return torch.equal(piece.local, whole[piece.region]) and piece.shape == tuple(whole.shape)


def _dtensors(rank, world):
    """Every placement of torch on one and two mesh dimensions, uneven and with empty parts."""
    mesh = init_device_mesh("cpu", (2, 2))
    found = {}
    for size in (1, 3, 5, 8):
        whole = _whole((size, 6))
        for placements in [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(),) * 2]:
            piece = piece_of(distribute_tensor(whole, mesh, placements, src_data_rank=None))
            assert _held(piece, whole), placements
            found[f"{size} {placements}"] = (piece.box, piece.owned)
    with pytest.raises(ValueError, match="a sum that was not made yet"):
        piece_of(DTensor.from_local(torch.ones(2), mesh, (Partial(), Replicate())))
    return found


def test_pieces_of_dtensors_cover_the_whole_once():
    ranks = run_ranks(_dtensors, 4)
    for name in ranks[0]:
        boxes = [box for box, owned in (found[name] for found in ranks) if owned and box.volume]
        assert cover_problem((int(name.split()[0]), 6), boxes) is None, name


def _streams(tensors, group=None):
    """What the ranks iterate over: names on all, tensors on the first."""
    return {name: None if whole is None else whole.clone() for name, whole in stream_whole(tensors, group)}


def test_one_process_needs_no_group():
    tensors = {"b.10": torch.arange(3.0), "b.9": nn.Parameter(torch.ones(2, 2)), "a": torch.tensor(True)}
    found = _streams(tensors)
    assert list(found) == ["a", "b.9", "b.10"]
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def _every_layout(rank, world):
    """FSDP2's shards, a hand-made tp split of what FSDP2 sharded, experts, a pipeline's part, and copies."""
    module._MESSAGE_BYTES = 40  # so that a tensor takes several messages
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh.get_local_rank("tp")
    tensors, want = {}, {}
    for index, dtype in enumerate(DTYPES):
        whole = want[f"fsdp.{index}"] = _whole((5, 3), dtype)
        tensors[f"fsdp.{index}"] = distribute_tensor(whole, mesh, (Shard(0), Shard(1)), src_data_rank=None)
    for dim in (0, 1):
        split = Split("tp", dim, unit=2)
        whole = want[f"tp.{dim}"] = _whole((6, 10), seed=dim)
        first, stop = split.span(whole.shape[dim], 2, tp)
        part = distribute_tensor(whole.narrow(dim, first, stop - first), mesh["dp"], (Shard(0),), src_data_rank=None)
        tensors[f"tp.{dim}"] = piece = place(piece_of(part), split, 2, tp, tuple(whole.shape))
        assert _held(piece, whole)
    experts = want["experts"] = _whole((7, 2, 3), seed=9)
    first, stop = span(7, world, rank)
    tensors["experts"] = place(piece_of(experts[first:stop]), Split("ep", 0), world, rank, (7, 2, 3))
    shared = want["copies"] = _whole((3,), seed=4)
    tensors["copies"] = piece_of(shared).owned_if(rank == 3)
    want["scalar"] = tensors["scalar"] = torch.tensor(2.5)
    want["empty"] = tensors["empty"] = torch.zeros(0, 4)
    for owner in range(world):
        want[f"blocks.{owner}"] = _whole((8, 2), seed=owner).t()
    tensors[f"blocks.{rank}"] = want[f"blocks.{rank}"]
    found = _streams(tensors)
    if rank > 0:
        assert all(value is None for value in found.values())
    else:
        assert found.keys() == want.keys()
        for name, value in want.items():
            assert found[name].dtype == value.dtype and torch.equal(_bits(found[name]), _bits(value)), name
    return list(found)


def _bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_whole_tensors_out_of_every_layout():
    ranks = run_ranks(_every_layout, 4)
    assert all(names == sorted(names, key=natural) == ranks[0] for names in ranks)


def _fsdp(rank, world):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    want = {name: value.detach().clone() for name, value in net.named_parameters()}
    hsdp = init_device_mesh("cpu", (2 if world == 4 else 1, 2 if world == 4 else world), mesh_dim_names=("r", "s"))
    mesh = hsdp if world == 4 else hsdp["s"]
    for part in (*net, net):
        fully_shard(part, mesh=mesh)
    found = _streams(dict(net.named_parameters()))
    return rank > 0 or all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fsdp2_and_hsdp(world):
    assert all(run_ranks(_fsdp, world))


def _bad(rank, world):
    whole = torch.arange(4.0)
    first, stop = span(4, world, rank)
    part = Piece(whole[first:stop], (4,), (first,))
    cases = {
        "missing": part.owned_if(rank == 0),
        "doubled": part if rank == 0 else piece_of(whole),
        "shape": torch.zeros(2 + rank),
        "dtype": torch.zeros(2, dtype=DTYPES[rank]),
        "nobody": replace(piece_of(whole), owned=False),
    }
    told = {}
    for name, piece in cases.items():
        with pytest.raises(ValueError) as caught:
            list(stream_whole({name: piece}))
        told[name] = str(caught.value)
    return told


def test_pieces_that_are_not_the_whole_are_refused_on_every_rank():
    first, second = run_ranks(_bad, 2)
    assert first == second
    assert "is covered by 2 of 4 elements" in first["missing"] and "is covered by 0 of 4" in first["nobody"]
    assert "is covered by 6 of 4 elements" in first["doubled"]
    assert first["shape"].endswith("rank 1 has torch.float32 [3], another rank torch.float32 [2]")
    assert first["dtype"].endswith("rank 1 has torch.bfloat16 [2], another rank torch.float32 [2]")


def _subgroup(rank, world):
    """A group whose ranks are not the job's."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    found = _streams({"w": Piece(torch.full((2,), float(rank)), (4,), (2 * rank - 2,))}, group)
    return found["w"] if found["w"] is None else found["w"].tolist()


def test_a_part_of_the_job_streams_to_its_own_first_rank():
    assert run_ranks(_subgroup, 3) == [None, [1.0, 1.0, 2.0, 2.0], None]
