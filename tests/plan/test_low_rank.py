"""Memory of adapters and of what is frozen beside them, against the model and the state that are really built."""

import pytest
import torch

from tests.models.sections import VOCAB, small
from truestep.models.build import build_model
from truestep.models.decoder import Decoder
from truestep.parallel.job import Job
from truestep.plan.low_rank import adapter_weights
from truestep.plan.memory import rank_memory
from truestep.plan.setup import Setup
from truestep.recipe.degrees import Degrees
from truestep.recipe.machine import Machine
from truestep.recipe.mla import Mla
from truestep.recipe.moe import Moe
from truestep.recipe.posttrain import Lora
from truestep.recipe.stage import Stage
from truestep.train.adapt import adapt
from truestep.train.build import build

SECTIONS = {
    "plain": small(),
    "tied": small(tie_embeddings=True),
    "experts": small(family="mixtral", moe=Moe(num_experts=4, top_k=2, expert_size=16)),
    "latent": small(family="deepseek_v3", mla=Mla(q_rank=10, kv_rank=6, nope_dim=6, rope_dim=2, v_dim=4),
                    moe=Moe(num_experts=4, top_k=2, expert_size=16, shared_size=16, dense_layers=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("targets", [["attention"], ["embeddings", "blocks.1.*"], ["*"]], ids=str)
def test_adapters_are_counted_as_they_are_built(name, targets):
    section, lora = SECTIONS[name], Lora(rank=3, targets=targets)
    model = build_model(section, VOCAB)
    assert isinstance(model, Decoder)
    adapt(model, lora, lambda part, pieces: None, 1)
    built = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers = list(range(section.num_layers))
    found = adapter_weights(section, lora, layers, Degrees(), ["embeddings", "head"])
    assert found.total == built


def held(rank: int, world: int, lora: dict, precision: str) -> tuple[int, int, int]:
    """Bytes of parameters, of gradients and of optimizer state (but for step counts) after a build."""
    stage, section = planned(lora), SECTIONS["plain"]
    model = build_model(section, VOCAB)
    fill = adapt(model, stage.lora, lambda part, pieces: [p.local.fill_(0.1) for p in pieces.values()], 1)
    state = build(stage, model, fill, job=Job(rank, world, rank, world, torch.device("cpu"), "test", None, None),
                  machine=Machine(device="cpu", precision=precision), precision=precision, seed=1, steps=5)  # fmt: skip
    params = state.parallel.named_parameters().values()
    optimizer = sum(x.nbytes for x in state.optimizer.named_state().values() if x.ndim)
    return sum(p.nbytes for p in params), sum(p.nbytes for p in params if p.requires_grad), optimizer


def planned(lora: dict) -> Stage:
    return Stage(name="x", data="x", start="y", context=16, tokens=64, batch_tokens=32, lora=lora)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("base", ["full", "nf4", "int8"])
def test_memory_is_that_of_the_state(precision, base):
    lora = {"rank": 4, "base": base}
    machine = Machine(device="cpu", precision=precision)
    plan = rank_memory(Setup(SECTIONS["plain"], Degrees(), machine, planned(lora), 2), 0)
    assert (plan.parameters, plan.gradients, plan.optimizer) == held(0, 1, lora, precision)
    full = rank_memory(
        Setup(SECTIONS["plain"], Degrees(), machine, planned(lora).model_copy(update={"lora": None}), 2), 0
    )
    assert plan.total < full.total
