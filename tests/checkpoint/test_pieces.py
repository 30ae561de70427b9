"""Whatever way a state is cut over ranks, it is saved once and loads on any other cut."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.common import many, save_one
from tests.dist import run_ranks
from truestep.checkpoint.catalogue import begin_epoch, newest, read_manifest
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.control import Alone, Group
from truestep.checkpoint.load import Mismatch, load, load_newest
from truestep.errors import CheckpointError
from truestep.numerics.pieces import Piece, Split, piece_of, place
from truestep.storage.local import LocalStore
from truestep.storage.objects import ObjectStore

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool]


@st.composite
def _layout(draw, shape, num_ranks):
    """A box for each rank, or None where it has none: cells of an uneven grid, each with one owner; the other ranks
    have copies of a cell or of any other box, or nothing at all."""
    borders = [[0, size] for size in shape]
    for dim in draw(st.permutations(range(len(shape)))):
        room = num_ranks // math.prod(len(line) - 1 for line in borders)
        inner = draw(st.lists(st.integers(0, shape[dim]), max_size=max(0, room - 1)))
        borders[dim] = sorted([0, shape[dim], *inner])  # empty cells are fine
    cells = list(itertools.product(*(itertools.pairwise(line) for line in borders)))
    ranks = draw(st.permutations(range(num_ranks)))
    held: list[tuple | None] = [None] * num_ranks
    for index, rank in enumerate(ranks):
        if index < len(cells):
            held[rank] = (cells[index], True)
        elif draw(st.booleans()):
            other = tuple(tuple(sorted(draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in shape)
            held[rank] = (draw(st.sampled_from([*cells, other])), False)
    return held


def _state(shapes, seed):
    made = torch.Generator().manual_seed(seed)
    return {
        f"model.t{index}": torch.randint(0, 100, shape, generator=made).to(DTYPES[(index + seed) % len(DTYPES)])
        for index, shape in enumerate(shapes)
    }


def _pieces(state, layouts, rank):
    found = {}
    for name, layout in layouts.items():
        if layout[rank] is not None:
            cell, owned = layout[rank]
            local = state[name][tuple(slice(*side) for side in cell)].clone()
            found[name] = Piece(local, tuple(state[name].shape), tuple(start for start, _ in cell), owned)
    return found


def _on_ranks(num_ranks, work):
    """`work(group of the rank)` in a thread for each rank, with one key-value store."""
    kv = Alone()
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(work, [Group(kv, "test", rank, num_ranks, 20.0) for rank in range(num_ranks)]))


def _save(store, step, pieces_of_rank):
    def work(group):
        options = {"attempt": 1, "rank": group.rank, "world": 1, "kv": None, "block_bytes": 64, "deadline_s": 20.0}
        checkpointer = Checkpointer(store, **options)
        checkpointer.group = group
        result = checkpointer.save(step, pieces_of_rank(group.rank), {"cursor": 3}, asynchronous=True).result()
        checkpointer.close()
        return result

    return work


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4),
    saved=st.integers(1, 5),
    wanted=st.integers(1, 5),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_cut_loads_on_any_other(shapes, saved, wanted, seed, data):
    state = _state(shapes, seed)
    cuts = [{n: data.draw(_layout(t.shape, count)) for n, t in state.items()} for count in (saved, wanted)]
    store = ObjectStore("memory://")
    begin_epoch(store)
    for result in _on_ranks(saved, _save(store, 1, lambda rank: _pieces(state, cuts[0], rank))):
        assert result.ok, result.error
    assert result.num_bytes == sum(tensor.nbytes for tensor in state.values()), "every element is written once"

    def restore(group):
        targets = _pieces({name: torch.zeros_like(tensor) for name, tensor in state.items()}, cuts[1], group.rank)
        loaded = load_newest(store, targets, group=group)
        assert loaded is not None and loaded.extra == {"cursor": 3} and loaded.unexpected == []
        return all(torch.equal(piece.local, state[name][piece.region]) for name, piece in targets.items())

    assert all(_on_ranks(wanted, restore))


def _bad(rank):
    whole = torch.arange(4.0)
    half = Piece(whole[2 * rank : 2 * rank + 2], (4,), (2 * rank,))
    return {
        "half is nobody's": {"w": half.owned_if(rank == 0)},
        "all of it is nobody's": {"w": replace(piece_of(whole), owned=False), "v": whole},
        "half is owned twice": {"w": half if rank else piece_of(whole)},
    }


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("half is nobody's", "w is covered by 2 of 4 elements"),
        ("all of it is nobody's", "w is covered by 0 of 4 elements"),
        ("half is owned twice", "w is covered by 6 of 4 elements"),
    ],
)
def test_pieces_that_are_not_the_whole_are_not_saved(case, sentence):
    store = ObjectStore("memory://")
    begin_epoch(store)
    for result in _on_ranks(2, _save(store, 1, lambda rank: _bad(rank)[case])):
        assert not result.ok and sentence in result.error
    assert newest(store) is None


def test_what_many_ranks_hold_is_written_by_all_of_them():
    """Copies are not owned, but the work of writing them is shared out evenly."""
    state = {f"w{index}": torch.full((16,), float(index)) for index in range(8)}
    store = ObjectStore("memory://")
    begin_epoch(store)

    def held(rank):
        return {name: piece_of(tensor).owned_if(rank == 0) for name, tensor in state.items()}

    assert all(result.ok for result in _on_ranks(4, _save(store, 1, held)))
    manifest = read_manifest(store, newest(store))
    assert sorted(entry.size for entry in manifest.objects.values()) == [128] * 4


def test_a_copy_that_is_cut_otherwise_is_not_written():
    """A last pipeline stage keeps a copy of the tied table, perhaps whole where the first stage has it in parts."""
    whole = torch.arange(6.0)
    store = ObjectStore("memory://")
    begin_epoch(store)

    def held(rank):
        part = Piece(whole[3 * rank : 3 * rank + 3], (6,), (3 * rank,))
        return {"w": part if rank < 2 else piece_of(whole).owned_if(False)}

    for result in _on_ranks(3, _save(store, 1, held)):
        assert result.ok and result.num_bytes == whole.nbytes, result.error
    target = torch.zeros(6)
    load(store, newest(store), {"w": target})
    assert torch.equal(target, whole)


def test_a_name_that_only_another_rank_wants_is_not_unexpected(tmp_path):
    store = LocalStore(tmp_path)
    assert save_one(store, 1, {"model.a": torch.ones(2), "model.b": torch.ones(2), "model.c": torch.ones(2)}).ok

    def restore(names):
        def work(group):
            target = {names[group.rank]: torch.zeros(2)}
            try:
                load(store, newest(store), target, group=group)
            except Mismatch as error:
                return str(error)
            return next(iter(target.values())).tolist()

        return work

    for told in _on_ranks(2, restore(["model.a", "model.b"])):
        assert "the checkpoint holds what is not wanted here: model.c" in told
    assert _on_ranks(3, restore(["model.a", "model.b", "model.c"])) == [[1.0, 1.0]] * 3


def _whole_state():
    made = torch.Generator().manual_seed(3)
    shapes = {"embed": (10, 6), "blocks.0.q": (9, 6), "blocks.0.experts": (5, 4, 6), "blocks.1.q": (9, 6), "norm": (6,)}
    state = {f"model.{name}": torch.randn(shape, generator=made) for name, shape in shapes.items()}
    return state | {f"optim.{name.removeprefix('model.')}.exp_avg": value * 2 for name, value in state.items()}


def _mesh_pieces(state, kind, rank, world):
    """Layouts that truestep makes: HSDP; tensor parallel within FSDP2; pipeline with experts."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    outer, inner = mesh.get_local_rank("outer"), mesh.get_local_rank("inner")
    held: dict[str, torch.Tensor | Piece] = {}
    for name, tensor in state.items():
        shape, split = tuple(tensor.shape), Split("tp", 0, unit=3 if ".q" in name else 1)
        mine = split.span(shape[0], world // 2, inner)
        if kind == "hsdp":
            held[name] = distribute_tensor(tensor, mesh, (Replicate(), Shard(0)), src_data_rank=None)
        elif kind == "fsdp x tp" and tensor.dim() > 1:
            rows = distribute_tensor(tensor[slice(*mine)].clone(), mesh["outer"], (Shard(0),), src_data_rank=None)
            held[name] = place(piece_of(rows), split, world // 2, inner, shape)
        elif kind == "pp x ep" and "experts" in name:
            if outer == 0:
                held[name] = place(piece_of(tensor[slice(*mine)].clone()), split, world // 2, inner, shape)
        elif kind == "fsdp x tp" or (outer == 1) == (".1." in name or "norm" in name) or "embed" in name:
            held[name] = piece_of(tensor.clone()).owned_if(inner == 0 and (kind == "pp x ep" or outer == 0))
            if kind == "pp x ep" and "embed" in name and outer == 1:  # the last stage's copy of a tied table
                held[name] = piece_of(tensor.clone()).owned_if(False)
    return held


KINDS = ["hsdp", "fsdp x tp", "pp x ep"]


def _save_meshes(rank, world, folder):
    for kind in KINDS:
        checkpointer = many(LocalStore(folder / kind), rank, world)
        result = checkpointer.save(5, _mesh_pieces(_whole_state(), kind, rank, world), {}, True).result()
        assert result.ok, result.error
        assert result.num_bytes == sum(tensor.nbytes for tensor in _whole_state().values())
        checkpointer.close()
    dist.barrier()


def _load_meshes(rank, world, folder):
    state = _whole_state()
    blank = {name: torch.full_like(tensor, 7.0) for name, tensor in state.items()}
    kv = dist.distributed_c10d._get_default_store()
    for saved, wanted in itertools.product(KINDS, KINDS):
        held = _mesh_pieces(blank, wanted, rank, world)
        load_newest(LocalStore(folder / saved), held, group=Group.of(kv, rank, world, 20.0))
        for name, tensor in held.items():
            piece = piece_of(tensor)
            assert torch.equal(piece.local, state[name][piece.region]), (saved, wanted, name)


@pytest.mark.parametrize(("saved", "wanted"), [(4, 6), (6, 2)])
def test_every_axis_to_every_axis(tmp_path, saved, wanted):
    for kind in KINDS:
        begin_epoch(LocalStore(tmp_path / kind))
    run_ranks(_save_meshes, saved, tmp_path)
    run_ranks(_load_meshes, wanted, tmp_path)
    for kind in KINDS:
        whole = {name: torch.zeros_like(tensor) for name, tensor in _whole_state().items()}
        load_newest(LocalStore(tmp_path / kind), whole)
        assert all(torch.equal(whole[name], tensor) for name, tensor in _whole_state().items())


def test_a_piece_on_the_meta_device_is_named(tmp_path):
    store = LocalStore(tmp_path)
    assert save_one(store, 1, {"model.a": torch.ones(2)}).ok
    with pytest.raises(CheckpointError, match=r"model\.a is on the meta device"):
        load(store, newest(store), {"model.a": Piece(torch.zeros(1, device="meta"), (2,), (1,))})
