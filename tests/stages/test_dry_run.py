"""A dry run against real steps: the same memory, collectives and FLOPs on every kind of mesh; and against formulas."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests import dist, tiny
from truestep.cli.mesh_cost import countable_model
from truestep.cli.register import verbs
from truestep.errors import UserError
from truestep.models.build import build_model, init_weights
from truestep.numerics.fake import fake_memory, fake_mode, fake_tensors
from truestep.numerics.trace import Memory, Trace
from truestep.parallel.experts import place_experts
from truestep.plan.activations import block_activations
from truestep.plan.split import layer_costs, stage_layers
from truestep.recipe.load import load
from truestep.recipe.machine import Machine, Mesh
from truestep.recipe.stage import Stage
from truestep.stages.dry_run import StepCost, Traffic, costs_of_steps, fake_job, whole_rows
from truestep.stages.dry_run_recipe import Case, dry_run, telling_ranks
from truestep.stages.dry_run_scale import carried_on, series_of_layers, series_of_microbatches
from truestep.train.build import build

CONTEXT, MICROBATCHES = 16, 4
RECIPES = Path(__file__).parents[2] / "recipes"
MOE = {"family": "mixtral", "moe": {"num_experts": 4, "top_k": 2, "expert_size": 32}}
MESHES = {
    "one process": (1, Mesh(), {}),
    "replicas": (2, Mesh(dp_replicate=2), {}),
    "hsdp": (4, Mesh(dp_replicate=2), {"precision": "bfloat16"}),
    "tensor and data": (4, Mesh(tp=2), {"machine": {"activation_checkpointing": "full"}}),
    "pipeline and tensor": (4, Mesh(pp=2, tp=2), {}),
    "folded pipeline": (2, Mesh(pp=2), {"machine": {"pipeline": {"schedule": "zbv"}}, "num_layers": 4}),
    "context": (2, Mesh(cp=2), {}),
    "experts": (2, Mesh(ep=2), MOE),
}
ROWS = partial(whole_rows, 2, CONTEXT, MICROBATCHES)


def state(job, mesh, fill, precision="float32", machine=None, **model):
    """A training state whose experts all get equally many tokens."""
    section = tiny.section(**model)
    stage = Stage(name="tiny", data="x", context=CONTEXT, tokens=10_000, batch_tokens=192)
    settings = Machine.model_validate({"mesh": mesh, "head_chunk_tokens": 7} | (machine or {}))
    built = build(
        stage,
        build_model(section, tiny.VOCAB),
        fill,
        job=job,
        machine=settings,
        precision=precision,
        seed=1,
        steps=100,
    )
    for part in built.parallel.parts:
        place_experts(part, built.parallel.groups.axes.ep, forced_balance=True)
    return built


def real(rank, world, mesh, options) -> StepCost:
    """The leanest of some steps: a thread of gloo may hold on to a tensor a little longer, never shorter."""
    fill = partial(init_weights, seed=3)
    make = partial(state, tiny.job(rank, world), mesh, lambda model, pieces: fill(model, pieces=pieces), **options)
    warm_up, steps = warmed(world, mesh, 3)
    return min(costs_of_steps(make, warm_up, steps), key=lambda cost: cost.peak_bytes)


def warmed(world, mesh, steps):
    """Of DDP only the first step can be traced."""
    return (None, [ROWS]) if mesh.dp_replicate == world > 1 else (ROWS, [ROWS] * steps)


def fake(_, __, rank, world, mesh, options) -> StepCost:
    mode = fake_mode()
    with fake_job(rank, world) as job:
        make = partial(state, job, mesh, lambda model, pieces: None, **options)
        contexts = {"building": fake_memory(mode), "stepping": fake_tensors(mode)}
        (cost,) = costs_of_steps(make, *warmed(world, mesh, 1), **contexts)
    return cost


def alone(fn, *args):
    """In a process of its own, which may join a job that does not exist."""
    return dist._run(fn, 1, args, 300.0, group=False)[0]


def of_training(traffic: list[Traffic]) -> list[Traffic]:
    """Without the few bytes of the agreement between ranks, of which some are named by ranks that do not exist."""
    return [replace(one, bytes=0) if one.axis == "control" else one for one in traffic]


@pytest.mark.parametrize("name", MESHES)
def test_a_dry_run_finds_what_a_real_step_does(name):
    world, mesh, options = MESHES[name]
    found = dist.run_ranks(real, world, mesh, options, timeout_s=300)
    for rank in {0, world - 1}:
        dry = alone(fake, rank, world, mesh, options)
        assert of_training(dry.traffic) == of_training(found[rank].traffic)
        assert (dry.flops, dry.parameters) == (found[rank].flops, found[rank].parameters)
        assert dry.peak_bytes == pytest.approx(found[rank].peak_bytes, rel=0.01)
        assert dry.memory["parameters"] == found[rank].memory["parameters"]
        assert dry.memory["optimizer"] == found[rank].memory["optimizer"]


def test_one_process_holds_and_computes_what_the_recipe_counts():
    cost, section = alone(fake, 0, 1, Mesh(), {}), tiny.section()
    assert cost.parameters == section.counts().total
    assert sum(cost.flops.values()) == section.train_flops(MICROBATCHES * 2 * CONTEXT, CONTEXT)
    assert cost.memory["parameters"] == 4 * section.counts().total
    assert cost.memory["optimizer"] == 8 * section.counts().total + 4 * 21  # and a count of steps for each parameter


def test_memory_tells_kinds_by_their_lives():
    weight = torch.ones(50, 100, requires_grad=True)
    memory = Memory()
    with Trace(memory):
        memory.hold(weight, "parameters")
        memory.begin()
        x = torch.ones(10, 50)
        y = (x @ weight).exp()  # the product lives on: it becomes y's input, and y is kept
        torch.zeros(1000).sum()
        y.sum().backward()
    peak = memory.peak()
    assert peak["parameters"] == 4 * 50 * 100
    assert peak["gradients"] == 4 * 50 * 100
    assert peak["activations"] >= 4 * (10 * 50 + 10 * 100)
    assert sum(peak.values()) < 4 * (2 * 50 * 100 + 5 * 1000)


def test_a_smaller_storage_counts_less():
    memory = Memory()
    with memory.resizing(), Trace(memory):
        gathered = torch.ones(1000)
        gathered.untyped_storage().resize_(0)
        memory.begin()
        torch.ones(10)
    assert memory.peak() == dict.fromkeys(memory.peak(), 0) | {"temporaries": 40}


RECIPE = """
[run]
name = "small"
[tokenizer]
kind = "bytes"
[data.train]
source = "python-stdlib"
[model]
hidden_size = 32
num_layers = 16
num_heads = 4
num_kv_heads = 2
[[stages]]
name = "base"
data = "train"
context = 16
tokens = "100K"
batch_tokens = 512
gate = { kind = "none", reason = "a test" }
[machine]
microbatch_rows = 1
device = "cpu"
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def case_of(path, world, *overrides) -> Case:
    loaded = load(path, list(overrides))
    model = countable_model(loaded)
    assert model is not None
    return Case.of(loaded, model, loaded.stages[0], world)


def in_full(_, __, case: Case, rank: int) -> StepCost:
    """Without carrying anything on."""
    mode = fake_mode()
    rows = partial(whole_rows, case.machine.microbatch_rows, case.stage.context, case.microbatches)
    with fake_job(rank, case.degrees.world) as job:

        def make():
            settings = {"job": job, "machine": case.machine, "precision": case.precision, "seed": 0, "steps": 100}
            model = build_model(case.model, case.model.vocab_size)
            return build(case.stage, model, lambda model, pieces: None, **settings)

        return costs_of_steps(make, rows, [rows], building=fake_memory(mode), stepping=fake_tensors(mode))[0]


@pytest.mark.parametrize(
    ("overrides", "traced"),
    [
        (("stages.base.batch_tokens=64", "model.num_layers=13"), "[3, 4, 5] of 13 layers"),
        (("stages.base.batch_tokens=320", "model.num_layers=1"), "[2, 3, 4] of 10 microbatches"),
    ],
)
def test_what_is_carried_on_equals_the_whole(recipe, overrides, traced):
    case = case_of(recipe, 4, "machine.mesh.tp=2", *overrides)
    (found,) = dry_run(case, [3])
    assert found.traced == traced
    assert found.cost == alone(in_full, case, 3)


def test_a_full_pipeline_repeats_itself(recipe):
    case = case_of(recipe, 2, "machine.mesh.pp=2", "model.num_layers=2", "stages.base.batch_tokens=208")
    (found,) = dry_run(case, [0])
    assert found.traced == "[3, 4, 5] of 13 microbatches"
    assert found.cost == alone(in_full, case, 0)


def test_what_does_not_lie_on_a_line_is_not_carried_on():
    def cost(number: int) -> StepCost:
        return StepCost(number, {"parameters": number}, [], {"forward": number})

    assert carried_on([cost(2), cost(4), cost(6)], 3) == cost(12)
    assert carried_on([cost(2), cost(4), cost(7)], 3) is None
    assert carried_on([cost(7)], 0) == cost(7)


def test_blocks_repeat_by_kind():
    def sizes(**options) -> list[int]:
        return series_of_layers(tiny.section(**options)).sizes

    assert sizes(num_layers=40) == [3, 4, 5]
    assert sizes(num_layers=5) == [5]
    assert sizes(num_layers=41, family="gemma2", sliding_window=8, full_attention_every=2) == [7, 9, 11]
    assert sizes(num_layers=40, family="mixtral", moe=MOE["moe"] | {"dense_layers": 3}) == [6, 7, 8]


def test_microbatches_repeat_once_the_pipeline_is_full():
    pipeline = Machine().pipeline
    assert series_of_microbatches(16, pipeline, 16).sizes == [16]
    assert series_of_microbatches(100, pipeline, 16).sizes == [17, 18, 19]
    folded = pipeline.model_copy(update={"schedule": "zbv"})
    assert series_of_microbatches(102, folded, 4).sizes == [10, 14, 18]


def test_ranks_that_tell_most_are_the_first_of_their_kind(recipe):
    case = case_of(recipe, 8, "machine.mesh.pp=4", "machine.pipeline.split=[4, 5, 5, 2]")
    assert telling_ranks(case) == [0, 2, 6]


def test_activations_of_a_block_are_those_of_the_plan(recipe):
    """A trace of two more blocks holds what the formula adds up from the tensors that a block saves."""
    options = ("machine.device=cuda", "machine.mesh.tp=2", "stages.base.context=256")
    options = (*options, "stages.base.batch_tokens=512")

    def activations(layers: int) -> int:
        case = case_of(recipe, 4, *options, f"model.num_layers={layers}")
        return dry_run(case, [0])[0].cost.memory["activations"]

    case = case_of(recipe, 4, *options)
    kept = block_activations(case.model, 1, case.degrees, case.stage.context, 2, "none").held
    assert (activations(4) - activations(2)) / 2 == pytest.approx(kept, rel=0.01)


def test_the_command_prints_ranks_as_json(recipe):
    app = typer.Typer()
    verbs(app)
    command = ["plan", "--dry-run", "--world", "4", "--rank", "1", "--json", str(recipe)]
    done = CliRunner().invoke(app, [*command, "--set", "model.num_layers=2"], catch_exceptions=False)
    (rank,) = json.loads(done.stdout)
    assert rank["rank"] == 1 and rank["place"]["dp_shard"] == 1
    assert rank["peak_bytes"] == sum(rank["memory"].values())
    assert {one["kind"] for one in rank["traffic"]} == {"all-gather", "reduce-scatter", "all-reduce"}


def test_a_rank_that_is_none_is_refused(recipe):
    with pytest.raises(UserError, match="rank 4 is not one of 4; choose 0 to 3"):
        dry_run(case_of(recipe, 4), [4])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("llama-405b", 16_384), ("moe-1t", 18_432)])
def test_large_shapes_compute_what_the_recipe_counts(name, world):
    case = case_of(RECIPES / f"{name}.toml", world)
    pp, machine = case.degrees.pp, case.machine
    first, last = dry_run(case, [0, (pp - 1) * world // pp], processes=2)
    layers = stage_layers(case.model, machine.pipeline, pp, case.stage.context)
    costs, head = layer_costs(case.model, case.stage.context)
    rows = case.microbatches * machine.microbatch_rows
    for found, blocks, more in ((first, layers[0], 0), (last, layers[-1], head)):
        counted = 3 * rows * (sum(costs[block] for block in blocks) + more) / case.degrees.tp
        assert found.cost.flops["forward"] + found.cost.flops["backward"] == pytest.approx(counted, rel=0.02)
