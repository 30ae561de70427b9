"""Experts over ranks equal experts on one: outputs and gradients in float64, whatever the load; sizes without data."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests import tiny
from tests.models.sections import small
from tests.pool import Pool
from truestep.models.decoder import Decoder
from truestep.models.moe import MoE
from truestep.numerics.axis import Axis
from truestep.numerics.batch import IGNORE
from truestep.numerics.fake import fake_mode, fake_tensors
from truestep.numerics.pieces import span
from truestep.parallel.experts import ExpertParallel, place_experts
from truestep.recipe.machine import Mesh
from truestep.recipe.model import ModelSection
from truestep.train.step import train_step

CASES: dict[str, list[int]] = {  # tokens of each of 4 ranks; 2 ranks have the first and last two together
    "even": [6, 6, 6, 6],
    "uneven": [1, 13, 7, 3],
    "a rank without tokens": [9, 0, 4, 11],
    "one rank has all": [0, 0, 0, 24],
}


def section(experts: int = 8) -> ModelSection:
    moe = {"num_experts": experts, "top_k": 3, "expert_size": 12, "shared_size": 12, "scale": 2.5}
    return small(family="deepseek_v3", moe=moe, mla={"kv_rank": 8, "nope_dim": 4, "rope_dim": 4, "v_dim": 4})


def made(given: ModelSection) -> MoE:
    """Experts 2 and 5 are never chosen; the load of the others is uneven."""
    torch.manual_seed(0)
    moe = MoE(given).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
        assert moe.router.bias is not None
        moe.router.bias.copy_(torch.linspace(0, 0.4, len(moe.router.bias)))
        moe.router.bias[[2, 5]] = -1e9
    return moe


def tokens(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    x_ND, wanted_ND = torch.randn(2, count, 32, dtype=torch.float64, generator=random)
    return x_ND, wanted_ND


def ran(moe: MoE, x_ND: torch.Tensor, wanted_ND: torch.Tensor, recomputed: bool) -> dict[str, torch.Tensor]:
    """Output and all gradients of sum(output wanted)."""
    x_BTD = x_ND[None].clone().requires_grad_()
    y_BTD = checkpoint(moe, x_BTD, use_reentrant=False) if recomputed else moe(x_BTD)
    (y_BTD * wanted_ND).sum().backward()
    found = {"y": y_BTD[0].detach()}
    for name, tensor in (("x", x_BTD), *moe.named_parameters()):
        assert tensor.grad is not None, name
        found[name] = tensor.grad[0] if name == "x" else tensor.grad
    return found


def _rank(rank: int, world: int, counts: list[int], recomputed: bool, experts: int) -> dict[str, torch.Tensor]:
    axis = Axis("ep", world, rank, dist.group.WORLD)
    moe = made(section(experts))
    first, stop = span(experts, world, rank)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            setattr(moe.experts, name, torch.nn.Parameter(getattr(moe.experts, name)[first:stop].clone()))
    moe.dispatch = ExpertParallel(axis, experts)
    begin = sum(counts[:rank])
    mine = slice(begin, begin + counts[rank])
    x_ND, wanted_ND = tokens(sum(counts))
    return ran(moe, x_ND[mine], wanted_ND[mine], recomputed)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_experts_over_ranks_are_those_of_one(pool: Pool, case: str, world: int, recomputed: bool):
    counts = CASES[case] if world == 4 else [sum(CASES[case][:2]), sum(CASES[case][2:])]
    _check(pool.run(_rank, world, counts, recomputed, 8), 8)


def test_experts_need_not_divide(pool: Pool):
    _check(pool.run(_rank, 4, CASES["uneven"], False, 7), 7)


def _check(ranks: list[dict[str, torch.Tensor]], experts: int) -> None:
    whole = ran(made(section(experts)), *tokens(), recomputed=False)
    assert whole["experts.gate"][2].abs().max() == 0 and whole["experts.gate"][3].abs().max() > 0
    for name, wanted in whole.items():
        parts = [rank[name] for rank in ranks]
        together = name in ("y", "x") or name.startswith("experts.")
        found = torch.cat(parts) if together else torch.stack(parts).sum(0)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12, msg=name)


def test_one_rank_is_not_touched():
    moe = made(section())
    before = ran(moe, *tokens(), recomputed=False)
    moe.zero_grad()
    moe.dispatch = ExpertParallel(Axis("ep"), 8)
    for name, found in ran(moe, *tokens(), recomputed=False).items():
        assert torch.equal(found, before[name]), name
    model = Decoder(section())
    place_experts(model, Axis("ep"))
    assert not any(isinstance(moe.dispatch, ExpertParallel) for moe in model.moes().values())
    place_experts(torch.nn.Linear(2, 2), Axis("ep"))


def _forced(rank: int, world: int) -> tuple[list[int], bool]:
    moe = made(section())
    axis = Axis("ep", world, rank, dist.group.WORLD)
    dispatch = moe.dispatch = ExpertParallel(axis, 8, forced_balance=True)
    x_ND, wanted_ND = tokens()
    experts_NK, _ = moe.router(x_ND)
    sent = dispatch.send(x_ND, experts_NK)
    _, ends = dispatch.receive(sent)
    first, stop = span(8, world, rank)
    with torch.no_grad():
        for name in ("gate", "up", "down"):
            setattr(moe.experts, name, torch.nn.Parameter(getattr(moe.experts, name)[first:stop].clone()))
    found = ran(moe, x_ND, wanted_ND, recomputed=False)
    return ends.tolist(), all(torch.isfinite(x).all().item() for x in found.values())


def test_forced_balance_gives_every_expert_as_many(pool: Pool):
    assert pool.run(_forced, 2) == [([18, 36, 54, 72], True)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_of_a_dry_run_do_not_depend_on_data(dtype: torch.dtype):
    """On fake tensors nothing can be read: what is read is made up, and would make no sense as sizes."""
    mode = fake_mode()
    with fake_tensors(mode):
        moe = MoE(section())
        moe.dispatch = ExpertParallel(Axis("ep"), 8, forced_balance=True)
        x_BTD = torch.randn(2, 12, 32, dtype=dtype, requires_grad=True)
        moe(x_BTD).sum().backward()
        assert x_BTD.grad is not None and x_BTD.grad.shape == x_BTD.shape
        assert moe.experts.gate.grad is not None and moe.experts.gate.grad.shape == (8, 12, 32)
        local = MoE(section())
        assert local(x_BTD).shape == x_BTD.shape


def _low(rank: int, world: int, mesh: dict[str, int]) -> tuple[set, dict[str, float]]:
    """One step in bf16: dtypes of (hidden states, weight, weights) in routers, and what the step reports."""
    seen = set()
    with torch.device("meta"):
        model = Decoder(tiny.section(family="mixtral", moe={"num_experts": 4, "top_k": 2, "z_loss": 1e-3}))
    state = tiny.state(tiny.job(rank, world), precision="bfloat16", mesh=Mesh(**mesh), model=model)
    for moe in model.moes().values():
        moe.router.register_forward_hook(
            lambda own, args, out: seen.add((args[0].dtype, own.weight.dtype, type(own.weight), out[1].dtype))
        )
    (batch,) = tiny.rows(1)
    result = train_step(state, tiny.share(batch, rank, world), int((batch.labels_BT != IGNORE).sum()), [])
    return seen, {name: value for name, value in result.metrics.items() if name.startswith("experts.")}


def test_c27_routers_stay_fp32_under_mixed_precision(pool: Pool):
    """FSDP2 casts what it shards to bf16, but leaves routers alone; without it autocast does not reach them."""
    seen, alone = _low(0, 1, {})
    wanted = {(torch.bfloat16, torch.float32, torch.nn.Parameter, torch.float32)}
    assert seen == wanted
    for mesh in ({"dp_shard": 2}, {"dp_shard": 2, "ep": 2}):
        for seen, metrics in pool.run(_low, 2, mesh):
            assert seen == wanted
            assert metrics.keys() == alone.keys()
            assert metrics == pytest.approx(alone, rel=0.02)
    assert alone["experts.dropped"] == 0 and {"experts.0.load", "experts.1.z_loss"} < alone.keys()
