"""Muon: the same wherever the parts of matrices lie, near to torch's, and no matrix done twice."""

from dataclasses import asdict
from math import prod
from typing import Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests import tiny
from tests.pool import Pool
from truestep.models.decoder import Decoder
from truestep.numerics.boxes import Box, Layout, whole
from truestep.numerics.pieces import span, stream_whole
from truestep.numerics.roles import Role
from truestep.optim import muon, newton_schulz
from truestep.optim.build import build_optimizer
from truestep.optim.newton_schulz import cost, orthogonalise, orthogonalise_stacks
from truestep.optim.owners import buckets, runs_of
from truestep.recipe.degrees import Degrees
from truestep.recipe.machine import Mesh
from truestep.recipe.numerics import Numerics
from truestep.recipe.stage import Optim
from truestep.train.step import train_step

# Uneven over 2, 3 and 4 ranks; the third leaves ranks without rows. The last two are stacks.
SHAPES = {"a": (7, 4), "b": (4, 7), "c": (2, 6), "d": (5, 5), "e": (9, 3), "s": (5, 3, 4), "t": (4, 6, 2)}
MATRICES = sum(1 if len(shape) == 2 else shape[0] for shape in SHAPES.values())
SECTION = Optim(kind="muon", muon_lr=0.05, lr=0.01)

Grid = list[tuple[int, int | None]]
"""Axes of a mesh from the outermost: how many ranks, and the dimension that they cut (None: they hold copies)."""


def over(shape: tuple[int, ...], grid: Grid) -> Layout:
    """A tensor over the ranks of a grid: each axis cuts what the ones before it have left."""
    boxes = [Box((0,) * len(shape), shape)]
    for size, dim in grid:
        boxes = [box if dim is None else _part(box, dim, size, rank) for box in boxes for rank in range(size)]
    return Layout(shape, tuple(boxes))


def _part(box: Box, dim: int, size: int, rank: int) -> Box:
    start, stop = span(box.sizes[dim], size, rank)
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += start
    sizes[dim] = stop - start
    return Box(tuple(offsets), tuple(sizes))


def values(name: str, step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(ord(name) * 100 + step)
    return torch.randn(SHAPES[name], generator=g)


def train(layouts: dict[str, Layout], rank: int = 0, section: Optim = SECTION) -> dict[str, torch.Tensor]:
    """This rank's parameters and momenta after three steps with given gradients."""

    def mine(name: str, step: int) -> torch.Tensor:
        box = layouts[name].boxes[rank]
        region = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))
        return values(name, step)[region].clone()

    named = [(name, torch.nn.Parameter(mine(name, 0))) for name in layouts]
    group = dist.group.WORLD if dist.is_initialized() else None
    optimizer = build_optimizer(named, dict.fromkeys(layouts, Role.MATRIX), section, layouts=layouts, group=group)
    for step in (1, 2, 3):
        for name, param in named:
            param.grad = mine(name, step)
        optimizer.step()
    return {name: param.detach() for name, param in named} | optimizer.named_state()


def alone(section: Optim = SECTION) -> dict[str, torch.Tensor]:
    return train({name: whole(shape) for name, shape in SHAPES.items()}, section=section)


def _on_grid(rank: int, world: int, grids: dict[str, Grid], section: Optim) -> tuple[dict[str, torch.Tensor], int]:
    """The result, and how many matrices this rank orthogonalised."""
    done = []

    def one(x: torch.Tensor, *rest) -> torch.Tensor:
        done.append(1)
        return orthogonalise(x, *rest)

    def many(stacks: list[torch.Tensor], *rest) -> None:
        done.extend(len(stack) for stack in stacks)
        orthogonalise_stacks(stacks, *rest)

    with patch.object(muon, "orthogonalise", one), patch.object(muon, "orthogonalise_stacks", many):
        return train({name: over(SHAPES[name], grid) for name, grid in grids.items()}, rank, section), sum(done)


def assert_same_bits(pool: Pool, grids: dict[str, Grid], section: Optim = SECTION) -> list[int]:
    """Every rank has its part of what one process finds. Returns how many matrices each one did."""
    expected = alone(section)
    world = prod(size for size, _ in next(iter(grids.values())))
    results = pool.run(_on_grid, world, grids, section)
    for rank, (found, _) in enumerate(results):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            box = over(SHAPES[name[0]], grids[name[0]]).boxes[rank]
            region = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))
            assert torch.equal(tensor, expected[name][region]), (name, rank)
    return [count for _, count in results]


@pytest.mark.parametrize(
    "grid",
    [
        [(2, 0)],
        [(3, 0)],
        [(4, 0)],
        [(3, 1)],
        [(3, None)],
        [(2, None), (2, 0)],
        [(2, 0), (2, None)],
        [(2, 0), (2, 1)],
        [(2, 0), (2, 0)],
        [(2, 1), (2, 0)],
    ],
    ids=str,
)
def test_the_place_of_parts_changes_no_bit(pool, grid):
    done = assert_same_bits(pool, dict.fromkeys(SHAPES, grid))
    assert sum(done) == 3 * MATRICES and max(done) < sum(done)  # each matrix once a step, shared among the ranks


def test_tensors_may_lie_differently(pool):
    """As on one mesh: cut by heads and sharded, copied and sharded, experts over their axis and sharded inside."""
    column, row, copied = [(2, 0), (2, 0)], [(2, 0), (2, 1)], [(2, 0), (2, None)]
    experts, inside = [(2, 0), (2, 0)], [(2, 1), (2, 0)]
    grids = {"a": column, "b": row, "c": copied, "d": column, "e": row, "s": experts, "t": inside}
    done = assert_same_bits(pool, grids)
    assert sum(done) == 3 * MATRICES


def test_it_changes_no_bit_in_bfloat16_either(pool):
    section = Optim(kind="muon", muon_dtype="bfloat16")
    assert_same_bits(pool, {name: [(2, 0)] for name in SHAPES}, section)
    assert alone(section)["a"].dtype == torch.float32


def test_stacked_matrices_are_done_one_by_one():
    stacked = alone()["s"]
    for i in range(5):
        named = [("s", torch.nn.Parameter(values("s", 0)[i]))]
        optimizer = build_optimizer(named, {"s": Role.MATRIX}, SECTION)
        for step in (1, 2, 3):
            named[0][1].grad = values("s", step)[i]
            optimizer.step()
        torch.testing.assert_close(stacked[i], named[0][1].detach(), rtol=0, atol=1e-6)


# the model on meshes

MODEL = {"num_layers": 2, "family": "mixtral", "moe": {"num_experts": 4, "top_k": 2, "expert_size": 12}}
MESHES = {
    "fsdp2": Degrees(dp_shard=2),
    "fsdp3": Degrees(dp_shard=3),
    "ddp2": Degrees(dp_replicate=2),
    "hsdp": Degrees(dp_replicate=2, dp_shard=2),
    "tp": Degrees(tp=2),
    "tp x fsdp": Degrees(tp=2, dp_shard=2),
    "pp": Degrees(pp=2),
    "ep": Degrees(dp_shard=2, ep=2),
    "cp": Degrees(cp=2),
    "ep x tp": Degrees(dp_shard=2, tp=2, ep=2),
}


def _trained(
    rank: int, world: int, degrees: Degrees, precision: str, reduction: Literal["fast", "exact"] = "fast"
) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint after three steps, on rank 0."""
    with torch.device("meta"):
        model = Decoder(tiny.section(**MODEL))
    optim = {"kind": "muon", "lr": 1e-3, "muon_dtype": "auto", "schedule": {"kind": "constant", "warmup": 0}}
    state = tiny.state(
        tiny.job(rank, world),
        precision=precision,
        mesh=Mesh(**asdict(degrees)),
        optim=optim,
        model=model,
        numerics=Numerics(reduction=reduction),
    )
    groups = state.parallel.groups
    for batch in tiny.rows(3):
        mine = tiny.share(batch, groups.data_rank, groups.data_size, 2)
        train_step(state, mine, batch.num_targets, [])
    return {name: x.clone() for name, x in stream_whole(state.tensors()) if x is not None}


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, torch.Tensor]]:
    return {precision: _trained(0, 1, Degrees(), precision) for precision in ("float32", "float64")}


@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_makes_the_update_of_one_process(pool, one_process, name, precision, tolerance):
    degrees, expected = MESHES[name], one_process[precision]
    found = pool.run(_trained, degrees.world, degrees, precision)[0]
    assert found.keys() == expected.keys()
    assert {"optim.blocks.0.mlp.experts.gate.momentum_buffer", "optim.embed.weight.exp_avg"} <= found.keys()
    for key, tensor in expected.items():
        assert (found[key] - tensor).abs().max() <= tolerance, key


@pytest.mark.parametrize("name", ["fsdp3", "hsdp", "pp"])
def test_gradients_of_the_same_bits_make_weights_of_the_same_bits(pool, name):
    expected = _trained(0, 1, Degrees(), "float32", "exact")
    found = pool.run(_trained, MESHES[name].world, MESHES[name], "float32", "exact")[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_near_to_the_muon_of_torch():
    matrices = [name for name, shape in SHAPES.items() if len(shape) == 2]
    named = [(name, torch.nn.Parameter(values(name, 0))) for name in matrices]
    torchs = torch.optim.Muon([p for _, p in named], lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=True)
    for step in range(1, 4):
        for name, param in named:
            param.grad = values(name, step)
        torchs.step()
    ours = alone(Optim(kind="muon", muon_lr=0.05, muon_dtype="bfloat16"))
    for name, param in named:
        assert (ours[name] - param).abs().max() < 0.01 * (param - values(name, 0)).abs().max()


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_singular_values_come_near_to_one(shape):
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    x = orthogonalise(u @ torch.diag(torch.linspace(0.1, 3.0, len(v), dtype=torch.float64)) @ v, 5, torch.float64)
    singular = torch.linalg.svdvals(x)
    assert x.shape == shape and singular.min() > 0.6 and singular.max() < 1.3
    turned = u.T @ x @ v.T  # the singular vectors stay
    torch.testing.assert_close(turned, torch.diag(turned.diagonal()), rtol=0, atol=1e-12)


def test_a_zero_matrix_stays_zero():
    assert torch.equal(orthogonalise(torch.zeros(3, 2), 5, torch.float32), torch.zeros(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 32), (70, 33)])
def test_bits_of_a_stack_do_not_depend_on_what_else_there_is(shape, dtype):
    stack = torch.randn(11, *shape).to(dtype)
    together = [stack.clone(), torch.randn(2, 5, 5).to(dtype)]
    orthogonalise_stacks(together, 5, dtype)
    parts = list(stack.clone().split([1, 3, 2, 5]))
    for part in parts:
        orthogonalise_stacks([part], 5, dtype)
    assert torch.equal(together[0], torch.cat(parts))
    batches = []
    with patch.object(
        newton_schulz, "orthogonalise", lambda x, *rest: batches.append(x.shape) or orthogonalise(x, *rest)
    ):
        orthogonalise_stacks([stack[:3], stack[3:]], 5, dtype)
        orthogonalise_stacks([stack[:1]], 5, dtype)
    assert batches == [(8, *shape)] * 3


def test_matrices_without_gradient_stay():
    named = [(name, torch.nn.Parameter(values(name, 0))) for name in SHAPES]
    optimizer = build_optimizer(named, dict.fromkeys(SHAPES, Role.MATRIX), SECTION)
    for given in ("a", "s"):
        for name, param in named:
            param.grad = values(name, 1) if name == given else None
        before = {name: param.detach().clone() for name, param in named}
        optimizer.step()
        assert [name for name, param in named if not torch.equal(param, before[name])] == [given]


def test_work_is_shared_by_cost():
    shapes = [(64, 64)] * 3 + [(8, 8)] * 40
    runs = [(i, run) for i, shape in enumerate(shapes) for run in runs_of(whole(shape, 4))]
    (bucket,) = buckets(runs, 4, cost)
    load = [sum(cost(task.run.shape) for task in bucket if task.owner == rank) for rank in range(4)]
    assert sorted(task.tensor for task in bucket) == list(range(43)) and max(load) == cost(shapes[0])
    large = [(i, run) for i in range(5) for run in runs_of(whole((8192, 8192), 2))]
    assert [len(bucket) for bucket in buckets(large, 2, cost)] == [2, 2, 1]  # memory in flight is bounded


def test_what_lies_whole_on_a_rank_stays_there():
    (bucket,) = buckets([(0, run) for run in runs_of(over((8, 3, 2), [(2, 0), (2, 0)]))], 4, cost)
    assert [(task.run.first, task.owner) for task in bucket] == [(0, 0), (2, 1), (4, 2), (6, 3)]
    copies = runs_of(over((8, 3, 2), [(2, None), (2, 0)]))
    assert sorted((run.first, run.shape[0], *run.held) for run in copies) == [
        (0, 2, 0, 2),
        (2, 2, 0, 2),
        (4, 2, 1, 3),
        (6, 2, 1, 3),
    ]


def test_a_large_stack_on_one_rank_is_done_in_runs():
    assert [run.shape[0] for run in runs_of(whole((6, 4096, 2048)))] == [2, 2, 2]


def test_parts_that_are_not_the_whole_are_refused():
    with pytest.raises(ValueError, match=r"shape \[4, 3\] is covered by 6 of 12 elements"):
        runs_of(Layout((4, 3), (Box((0, 0), (2, 3)), Box((0, 0), (2, 3)))))
