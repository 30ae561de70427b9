"""Experts against a loop over tokens; latent attention against its formula; the grouped kernel against the loop."""

import pytest
import torch
from torch.nn.functional import silu

from tests.models.sections import VOCAB, small
from truestep.models import moe as moe_module
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.models.layers import LayerInput
from truestep.models.mla import LatentAttention
from truestep.models.moe import MoE, grouped_product
from truestep.models.rope import Rope, score_factor
from truestep.numerics.grouping import combine, group, permute, spread

MLA = {"q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 10}


def made(dtype: torch.dtype) -> MoE:
    given = {"num_experts": 5, "top_k": 2, "expert_size": 16, "shared_size": 16, "scale": 2.5}
    experts = MoE(small(family="deepseek_v3", moe=given, mla=MLA))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
            parameter.mul_(0.15)
    return experts.to(dtype)


def looped(experts: MoE, x_ND: torch.Tensor) -> torch.Tensor:
    """Token by token, choice by choice."""
    chosen_NK, weights_NK = experts.router(x_ND)
    e = experts.experts
    rows = []
    for x, chosen, weights in zip(x_ND, chosen_NK.tolist(), weights_NK):
        outputs = [w * (e.down[c] @ (silu(e.gate[c] @ x) * (e.up[c] @ x))) for c, w in zip(chosen, weights)]
        assert experts.shared is not None
        rows.append(sum(outputs) + experts.shared(x[None, None])[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_every_token_gets_its_experts(dtype: torch.dtype, atol: float):
    """float32 goes through the grouped kernel, float64 through its stand-in. Expert 3 has no token."""
    experts, alone = made(dtype), made(dtype)
    for each in (experts, alone):
        assert each.router.bias is not None
        each.router.bias[3] = -1e9
    x_BTD = torch.randn(2, 9, 32, dtype=dtype, generator=torch.Generator().manual_seed(0))
    leaves = [x_BTD.clone().requires_grad_() for _ in range(2)]
    y_BTD = experts(leaves[0])
    wanted = looped(alone, leaves[1].flatten(0, 1))
    torch.testing.assert_close(y_BTD.flatten(0, 1), wanted, atol=atol, rtol=0)
    for out in (y_BTD, wanted):
        (out.flatten() * torch.linspace(-1, 1, out.numel(), dtype=dtype)).sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, atol=10 * atol, rtol=0)
    for (name, a), b in zip(experts.named_parameters(), alone.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=10 * atol, rtol=0, msg=name)
    assert experts.experts.up.grad is not None and experts.experts.up.grad[3].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_the_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Groups without rows included; sizes of less than 16 bytes go to the loop by themselves."""
    ends = torch.tensor([3, 3, 4, 11], dtype=torch.int32)
    for inner, outer in ((16, 8), (7, 5)):
        rows = torch.randn(11, inner).to(dtype)
        weight = torch.randn(4, outer, inner).to(dtype)
        with monkeypatch.context() as patch:
            found = grouped_product(rows, weight, ends)
            patch.setattr(moe_module, "_has_kernel", lambda *_: False)
            wanted = grouped_product(rows, weight, ends)
        torch.testing.assert_close(found, wanted, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=0)
    assert moe_module._has_kernel(torch.empty(2, 16, dtype=dtype), torch.empty(4, 8, 16))
    assert not moe_module._has_kernel(torch.empty(2, 7, dtype=dtype), torch.empty(4, 5, 7))


def test_experts_under_autocast():
    """What DDP runs: weights in fp32, hidden states in bf16."""
    experts = made(torch.float32)
    x_BTD = torch.randn(2, 9, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BTD = experts(x_BTD)
    assert y_BTD.dtype == torch.bfloat16
    y_BTD.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in experts.parameters())
    torch.testing.assert_close(y_BTD.float(), made(torch.float32)(x_BTD.float()), atol=0.1, rtol=0.1)


@pytest.mark.slow
def test_compiled_blocks_count_and_route_as_plain_ones():
    """Experts stay out of the graph; the rest of the block is in it."""
    moe = {"num_experts": 6, "top_k": 2, "expert_size": 16, "shared_size": 16}
    models, found, tokens_BT = [], [], torch.arange(14).view(2, 7) % VOCAB
    for compiled in (False, True):
        model = build_model(small(family="deepseek_v3", num_layers=1, moe=moe, mla=MLA), VOCAB).to_empty(device="cpu")
        assert isinstance(model, Decoder)
        init_weights(model, 0)
        models.append(model)
        for block in model.blocks:
            if compiled:
                block.compile(backend="aot_eager")
        model.begin_step(tokens=14)
        model(tokens_BT).logsumexp(-1).sum().backward()
        found.append(model.end_step(lambda x: x))
    assert found[0] == pytest.approx(found[1])
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_grouping_keeps_order_and_returns():
    keys = torch.tensor([2, 0, 2, 4, 0, 0])
    grouped = group(keys, 5)
    assert grouped.order.tolist() == [1, 4, 5, 0, 2, 3] and grouped.ends.tolist() == [3, 3, 5, 5, 6]
    assert grouped.inverse[grouped.order].tolist() == list(range(6))
    assert group(keys[:0], 3).ends.tolist() == [0, 0, 0]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    order, inverse = grouped.order, grouped.inverse
    assert torch.equal(spread(x, order, inverse), x.repeat_interleave(2, 0)[order])
    assert torch.autograd.gradcheck(lambda x: spread(x, order, inverse), (x,))
    assert torch.autograd.gradcheck(lambda rows: permute(rows, order, inverse), (rows,))
    assert torch.autograd.gradcheck(lambda rows, w: combine(rows.view(3, 2, 4), w), (rows, weights))
    empty = torch.zeros(0, 4, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    spread(empty, nothing, nothing).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 4)


def test_latent_attention_is_its_formula():
    """Scores from the position-free and the rotated part of each head's key, the latter one for all heads."""
    scaling = {"kind": "yarn", "factor": 4.0, "original_context": 16, "mscale": 1.0, "mscale_all_dim": 0.8}
    section = small(family="deepseek_v3", moe={"num_experts": 4, "top_k": 2}, mla=MLA, rope_scaling=scaling)
    attention = LatentAttention(section, 0).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    x_TD = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    tables = Rope(4, section.rope_theta, section.rope_scaling).tables(torch.arange(6)[None], torch.float64)
    found = attention(x_TD[None], LayerInput(tables, None, None))[0]

    latent, shared = attention.kv_a(x_TD).split((16, 4), -1)
    queries = attention.q_b(attention.q_a_norm(attention.q_a(x_TD))).view(6, 4, 12)
    keys, values = attention.kv_b(attention.kv_a_norm(latent)).view(6, 4, 18).split((8, 10), -1)
    mixed = []
    for head in range(4):
        scores = queries[:, head, :8] @ keys[:, head].T
        scores = scores + _turned(queries[:, head, 8:], tables) @ _turned(shared, tables).T
        scores = scores * attention.scale + torch.full((6, 6), -torch.inf).triu(1)
        mixed.append(scores.softmax(-1) @ values[:, head])
    torch.testing.assert_close(found, attention.out(torch.cat(mixed, -1)), atol=1e-11, rtol=1e-11)
    factor = 0.1 * 0.8 * torch.tensor(4.0).log().item() + 1
    assert attention.scale == pytest.approx(12**-0.5 * factor**2) and score_factor(None) == 1.0


def _turned(x_TR: torch.Tensor, tables) -> torch.Tensor:
    """Pairs (2i, 2i + 1) as complex numbers, turned."""
    turn = torch.complex(tables.cos, tables.sin)[0, :, 0]
    return torch.view_as_real(torch.view_as_complex(x_TR.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(1)
