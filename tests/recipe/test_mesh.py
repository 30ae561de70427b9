"""[machine.mesh]: an impossible mesh gets one sentence, and the mesh that it names is possible."""

import re
from dataclasses import replace
from itertools import product
from math import log2, prod
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.recipe.small import problems, small
from truestep.errors import UserError
from truestep.recipe.check_mesh import Limits, degrees, faults, refusal
from truestep.recipe.degrees import AXES, Degrees
from truestep.recipe.load import load
from truestep.recipe.machine import Context, Machine, Mesh, Pipeline

MOE = {"num_experts": 8, "top_k": 2}


def _recipe(mesh: dict[str, Any], machine: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    recipe = small(machine={"mesh": mesh, "microbatch_rows": 1} | (machine or {}))
    recipe["model"] |= model
    return recipe


EXPERTS = {"family": "mixtral", "moe": MOE}
V, ULYSSES, UNBALANCED = (
    {"pipeline": {"schedule": "zbv"}},
    {"context": {"style": "ulysses"}},
    {"context": {"balance": False}},
)


@pytest.mark.parametrize(
    "mesh, machine, model, wrong, remedy",
    [
        ({"tp": 8}, {}, {}, "tp = 8, more than model.num_heads 4", "that fits is tp = 4"),
        (
            {"tp": 8, "dp_shard": 1},
            {},
            {},
            "tp = 8, more than model.num_heads 4",
            "of 8 processes that fits is dp_shard = 2, tp = 4",
        ),
        ({"pp": 4}, {}, {}, "pp = 4, more than model.num_layers 2", "that fits is pp = 2"),
        (
            {"pp": 2},
            V,
            {},
            "pp = 2 with 2 pipeline stages a rank, more than model.num_layers 2",
            "that fits is pp = 1, without machine.pipeline",
        ),
        (
            {"pp": 4, "tp": 8},
            {},
            {},
            "tp = 8, more than model.num_heads 4, and pp = 4, more than model.num_layers 2",
            "that fits is tp = 4, pp = 2",
        ),
        (
            {"cp": 3},
            UNBALANCED,
            {},
            "cp · tp = 3, which does not divide the context of 128 tokens",
            "that fits is cp = 4",
        ),
        (
            {"cp": 128},
            {},
            {},
            "cp · tp · 2 (machine.context.balance) = 256, which does not divide the context of 128 tokens",
            "that fits is cp = 64",
        ),
        (
            {"cp": 8},
            ULYSSES,
            {},
            'cp · tp = 8, which does not divide model.num_heads 4 (style = "ulysses")',
            "that fits is cp = 4",
        ),
        ({"ep": 2}, {}, {}, "ep = 2, but the model has no experts", "that fits is ep = 1"),
        ({"ep": 3}, {}, EXPERTS, "ep = 3, which does not divide model.moe.num_experts 8", "that fits is ep = 4"),
        (
            {"ep": 8, "dp_shard": 2, "tp": 2},
            {},
            EXPERTS,
            "ep = 8, which does not divide dp_shard · cp · tp = 4",
            "of 4 processes that fits is ep = 4",
        ),
    ],
)
def test_one_sentence_with_the_nearest_mesh(mesh, machine, model, wrong, remedy):
    said = f"recipe: machine.mesh has {wrong}; the nearest mesh {remedy}."
    assert problems(_recipe(mesh, machine, **model)) == [said]


@pytest.mark.parametrize(
    "mesh, says",
    [
        (
            {"ep": "auto"},
            'several degrees that are "auto" (dp_shard, ep); only one can be what is left: set the others.',
        ),
        ({"dp_shard": 10**9}, "degrees of more than 16,777,216 processes in all; make them smaller."),
        ({"tp": 10**18}, "degrees of more than 16,777,216 processes in all; make them smaller."),
    ],
)
def test_what_no_mesh_is_near_to(mesh, says):
    assert problems(_recipe(mesh)) == [f"recipe: machine.mesh has {says}"]


@pytest.mark.parametrize(
    "machine, says",
    [
        ({"pipeline": {"schedule": "gpipe"}}, "machine.pipeline is set but will not be used: it needs mesh.pp above 1"),
        ({"context": {"balance": False}}, "machine.context is set but will not be used: it needs mesh.cp above 1"),
        ({"async_tp": True}, "machine.async_tp is set but will not be used: it needs mesh.tp above 1"),
        (
            {"async_tp": True, "device": "cpu", "mesh": {"tp": 2}},
            "machine.async_tp is set but will not be used: it needs a CUDA device",
        ),
        (
            {"offload_optimizer": False, "device": "cpu"},
            "machine.offload_optimizer is set but will not be used: it needs a CUDA device",
        ),
        (
            {"mesh": {"pp": 2}, "pipeline": {"stages_per_rank": 2}},
            'machine.pipeline.stages_per_rank is set but will not be used: it needs schedule = "interleaved" or',
        ),
        (
            {"mesh": {"cp": 2}, "context": {"style": "ulysses", "balance": True}},
            'machine.context.balance is set but will not be used: it needs style = "all-gather"',
        ),
        (
            {"activation_memory": "1GiB"},
            'machine.activation_memory is set but will not be used: it needs activation_checkpointing = "auto"',
        ),
        (
            {"reshard_after_forward": False, "mesh": {"dp_shard": 1, "tp": 4}},
            "machine.reshard_after_forward is set but will not be used: it needs mesh.dp_shard above 1",
        ),
        (
            {"mesh": {"pp": 2}, "pipeline": {"split": [1, 2]}},
            "machine.pipeline.split has 2 numbers that add up to 3, but there are 2 pipeline stages and 2 layers; ",
        ),
    ],
)
def test_settings_without_effect_or_sense(machine, says):
    (sentence,) = problems(small(machine=machine))
    assert sentence.startswith(f"recipe: {says}"), sentence


def test_a_model_of_ones_own_is_split_over_data_only():
    (sentence,) = problems(_recipe({"tp": 2, "ep": 2, "dp_shard": 4}) | {"model": {"module": "my:Model"}})
    assert "has tp = 2, ep = 2, but a model of your own can be split over dp_replicate and dp_shard only" in sentence
    assert sentence.endswith("the nearest mesh of 8 processes that fits is dp_shard = 8, tp = 1, ep = 1.")
    load(_recipe({"dp_replicate": 2, "dp_shard": 4}) | {"model": {"module": "my:Model"}})


def test_what_is_possible_is_welcome():
    load(_recipe({"tp": 4, "pp": 2, "cp": 2, "dp_replicate": 2}))
    load(_recipe({"tp": 3, "dp_shard": 2}) | {"stages": [small()["stages"][0] | {"context": 96, "batch_tokens": 9600}]})
    load(_recipe({"tp": 2, "ep": 4, "dp_shard": 2}, family="mixtral", moe=MOE))
    load(_recipe({"pp": 2}, {"pipeline": {"schedule": "dualpipev", "split": [1, 2, 1, 2]}}, num_layers=6))


NAMED = re.compile(r"(\w+) = (\d+)")
DEGREE = st.integers(1, 9) | st.sampled_from([16, 45])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_mesh_that_a_refusal_names_is_possible(data):
    """With every setting that it says to leave out, and on the number of processes that it was asked for."""
    draw = data.draw
    asked: dict[str, Any] = {axis: draw(DEGREE) for axis in (*AXES, "ep") if draw(st.booleans())}
    machine: dict[str, Any] = {}
    if draw(st.booleans()):
        machine["pipeline"] = {"schedule": draw(st.sampled_from(["gpipe", "interleaved", "zbv"]))}
        asked |= {"pp": draw(st.integers(2, 9))}
    if draw(st.booleans()):
        machine["context"] = {"style": draw(st.sampled_from(["ulysses", "all-gather"]))}
        asked |= {"cp": draw(st.integers(2, 9))}
    if asked.get("tp", 1) > 1 and draw(st.booleans()):
        machine["async_tp"] = True
    heads, context = draw(st.sampled_from([4, 6, 12])), draw(st.sampled_from([96, 128, 1000]))
    model = {"num_heads": heads, "head_dim": 16, "num_layers": draw(st.integers(1, 12))}
    if draw(st.booleans()):
        model |= {"family": "mixtral", "moe": MOE}
    recipe = _recipe(asked, machine, **model)
    recipe["stages"][0] |= {"context": context, "batch_tokens": 10 * context}
    found = problems(recipe)
    assume(found and "more than 16,777,216" not in found[0])
    (sentence,) = found
    _, _, remedy = sentence.partition("that fits is ")
    assert remedy and "machine.mesh has " in sentence
    asked |= {axis: int(degree) for axis, degree in NAMED.findall(remedy)}
    for name in re.findall(r"machine\.(\w+)", remedy):
        machine.pop(name)
    again = _recipe(asked, machine, **model)
    again["stages"] = recipe["stages"]
    assert problems(again) == []


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*AXES, "ep"]), DEGREE),
    st.none() | st.sampled_from(AXES),
    st.sampled_from([1, 2, 6, 8, 12, 36, 720, 1024, 16384]),
    st.builds(
        Limits,
        num_heads=st.none() | st.integers(1, 128),
        num_layers=st.none() | st.integers(1, 128),
        num_experts=st.none() | st.sampled_from([0, 8, 60, 256]),
        contexts=st.sampled_from([(128,), (96, 4096), (1000,)]),
        own_module=st.booleans(),
        machine=st.builds(
            Machine,
            pipeline=st.builds(Pipeline, schedule=st.sampled_from(["1f1b", "interleaved", "zbv"])),
            context=st.builds(Context, style=st.sampled_from(["ulysses", "all-gather"])),
        ),
    ),
)
def test_the_nearest_mesh_of_a_world_is_possible(asked, open_axis, world, limits):
    if open_axis:
        asked = {"dp_shard": 1} | asked | {open_axis: "auto"}
    mesh = Mesh.model_validate(asked)
    try:
        found = degrees(mesh, limits, world)
    except UserError as error:
        _, _, remedy = str(error).partition(" is ")
        again = asked | {axis: int(degree) for axis, degree in NAMED.findall(remedy)}
        found = degrees(Mesh.model_validate(again), limits, world)
    assert found.world == world and found.edp * found.ep == found.dp_shard * found.cp * found.tp
    sizes = {axis: value for axis, value in vars(found).items()}
    assert list(faults(sizes, limits)) == []


@settings(max_examples=40, deadline=None)
@given(st.fixed_dictionaries({axis: st.integers(1, 12) for axis in (*AXES, "ep")}))
def test_no_mesh_is_nearer(asked):
    """Against a search through all meshes of a world."""
    limits = Limits(num_heads=6, num_layers=5, num_experts=8, contexts=(96,))
    mesh = Mesh.model_validate(asked)
    words = refusal(mesh, limits, 24)
    assume(words)
    weights = {"dp_shard": 1.0, "dp_replicate": 1.1, "ep": 1.5, "cp": 1.5, "pp": 1.5, "tp": 1.5}

    def cost(one: dict[str, int]) -> float:
        return sum(weights[axis] * abs(log2(one[axis] / asked[axis])) for axis in one)

    costs = [cost(one) for one in every_mesh(24) if not list(faults(one, limits))]
    assert cost(degrees_named(words, mesh)) == pytest.approx(min(costs))


def every_mesh(world: int) -> list[dict[str, int]]:
    """All meshes of a world, with expert degrees up to it."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    found = []
    for a, b, c, d in product(sizes, repeat=4):
        if world % (a * b * c * d) == 0:
            outer = dict(zip(AXES, (a, b, c, d, world // (a * b * c * d)), strict=True))
            found += [outer | {"ep": ep} for ep in sizes]
    return found


@pytest.mark.parametrize(
    "asked, wrong",
    [
        ({"tp": 4}, 0),
        ({"tp": 5}, 1),
        ({"pp": 3}, 0),
        ({"pp": 4}, 1),
        ({"cp": 16}, 0),
        ({"cp": 32}, 1),
        ({"ep": 4, "dp_shard": 4}, 0),
        ({"ep": 4, "dp_shard": 2, "cp": 2}, 0),
        ({"ep": 4, "dp_replicate": 4}, 1),
    ],
)
def test_the_edges_of_what_is_possible(asked, wrong):
    limits = Limits(num_heads=4, num_layers=3, num_experts=8, contexts=(160,))
    full = dict.fromkeys((*AXES, "ep"), 1) | asked
    assert len(list(faults(full, limits))) == wrong


def degrees_named(words: str | None, mesh: Mesh) -> dict[str, int]:
    """The whole mesh that a refusal names."""
    assert words is not None
    return dict(mesh) | {axis: int(degree) for axis, degree in NAMED.findall(words.partition(" is ")[2])}


def test_an_open_expert_degree_takes_what_experts_and_ranks_allow():
    limits = Limits(num_experts=12)
    assert degrees(Mesh(dp_shard=4, tp=2, ep="auto"), limits, 8).ep == 4
    assert degrees(Mesh(dp_shard=8, ep="auto"), replace(limits, num_experts=0), 8).ep == 1


@given(st.builds(Degrees, *[st.integers(1, 4)] * 5))
def test_coordinates_count_every_rank_once_with_tensor_innermost(mesh):
    found = [mesh.coordinate(rank) for rank in range(mesh.world)]
    assert len(set(found)) == mesh.world == prod(vars(mesh)[axis] for axis in AXES)
    assert [c[:5] for c in found] == sorted(c[:5] for c in found)
    with pytest.raises(IndexError):
        mesh.coordinate(mesh.world)


def test_experts_are_folded_over_neighbouring_ranks():
    mesh = Degrees(pp=2, dp_replicate=1, dp_shard=2, cp=1, tp=2, ep=2)
    assert mesh.edp == 2 and mesh.dense_shard == 2 and mesh.data_parallel == 2
    assert [(c.pp, c.edp, c.ep) for c in map(mesh.coordinate, range(8))] == [
        (pp, edp, ep) for pp in (0, 1) for edp in (0, 1) for ep in (0, 1)
    ]


def test_who_keeps_the_weights():
    replicas, experts_over_tp = Degrees(dp_replicate=4), Degrees(tp=4)
    assert replicas.by_ddp(experts=False) and not replicas.by_fsdp(experts=False)
    for other in ({"experts": True}, {"experts": False, "exact": True}):
        assert not replicas.by_ddp(**other) and replicas.by_fsdp(**other)
    assert experts_over_tp.by_fsdp(experts=True) and not experts_over_tp.by_fsdp(experts=False)
    assert not Degrees().by_ddp(experts=False) and not Degrees().by_fsdp(experts=True)
