"""The decoder: documents, padding, precision of its fp32 islands, roles, counts."""

import pytest
import torch

from tests.models.sections import VOCAB, small
from truestep.models.build import build_model, init_weights
from truestep.models.cache import KVCache
from truestep.models.decoder import Decoder
from truestep.models.layers import RMSNorm
from truestep.models.rope import Rope, frequencies
from truestep.numerics.head import HeadInput
from truestep.numerics.roles import Role
from truestep.recipe.model import ModelSection

SECTIONS = {
    "llama": small(),
    "qwen3": small(family="qwen3", head_dim=16, tie_embeddings=True),
    "gemma2": small(
        family="gemma2", sliding_window=3, full_attention_every=2, attention_softcap=5.0, logit_softcap=9.0
    ),
    "gemma3": small(family="gemma3", sliding_window=3, full_attention_every=2),
    "olmo2": small(family="olmo2"),
    "mixtral": small(family="mixtral", moe={"num_experts": 4, "top_k": 2}),
    "qwen3_moe": small(family="qwen3_moe", moe={"num_experts": 6, "top_k": 3, "expert_size": 16, "dense_layers": 1}),
    "deepseek_v3": small(
        family="deepseek_v3",
        moe={"num_experts": 6, "top_k": 2, "expert_size": 16, "shared_size": 32, "groups": 3, "top_groups": 2},
        mla={"q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 10},
    ),
    "latent": small(mla={"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 6, "interleave": False}),
}


def ready(section: ModelSection, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_model(section, VOCAB).to(dtype).to_empty(device="cpu")
    init_weights(model, 0)
    assert isinstance(model, Decoder)
    return model


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=SECTIONS)
def section(request: pytest.FixtureRequest) -> ModelSection:
    return SECTIONS[request.param]


@torch.no_grad()
def test_c06_packed_documents_keep_their_bits(section: ModelSection):
    """Document 2's logits do not change by a bit with document 1's tokens, and are those of the document alone. (With
    experts they may in the last bit: a product's order of sums goes by how many tokens share an expert.)"""
    model = ready(section)
    tokens_BT, positions_BT = tokens(1, 11), torch.tensor([[*range(5), *range(6)]])
    documents_BT = torch.tensor([[0] * 5 + [1] * 6], dtype=torch.int32)
    first = model(tokens_BT, positions_BT, documents_BT)
    changed_BT = tokens_BT.clone()
    changed_BT[0, :5] = tokens(5, seed=1)
    second = model(changed_BT, positions_BT, documents_BT)
    assert not torch.equal(first[:, :5], second[:, :5])
    if section.moe is None:
        assert torch.equal(first[:, 5:], second[:, 5:])
    torch.testing.assert_close(first[:, 5:], second[:, 5:], atol=1e-6, rtol=0)
    torch.testing.assert_close(first[:, 5:], model(tokens_BT[:, 5:]), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_c11_left_padding_does_not_shift_positions(section: ModelSection):
    model = ready(section)
    tokens_BT = tokens(1, 5)
    documents_BT = torch.tensor([[-1, -1, 0, 0, 0]], dtype=torch.int32)
    padded = model(tokens_BT, torch.tensor([[0, 0, 0, 1, 2]]), documents_BT)
    torch.testing.assert_close(padded[:, 2:], model(tokens_BT[:, 2:]), atol=1e-6, rtol=0)
    assert torch.isfinite(padded).all()


def test_padding_rows_pass_no_gradient(section: ModelSection):
    model = ready(section)
    documents_BT = torch.tensor([[0] * 6, [-1] * 6], dtype=torch.int32)
    tokens_BT = tokens(2, 6)
    model(tokens_BT, None, documents_BT)[0].square().sum().backward()
    alone = ready(section)
    alone(tokens_BT[:1]).square().sum().backward()
    for (name, found), wanted in zip(model.named_parameters(), alone.parameters()):
        assert found.grad is not None and wanted.grad is not None
        torch.testing.assert_close(found.grad, wanted.grad, atol=1e-4, rtol=1e-4, msg=name)


@torch.no_grad()
def test_cache_gives_the_same_logits(section: ModelSection):
    model = ready(section)
    tokens_BT, documents_BT = tokens(2, 9), torch.tensor([[0] * 9, [-1, -1, *[0] * 7]], dtype=torch.int32)
    positions_BT = torch.tensor([[*range(9)], [0, 0, *range(7)]])
    whole = model(tokens_BT, positions_BT, documents_BT)
    cache, parts = KVCache(3, 2, 9), []
    for start, stop in [(0, 4), (4, 5), (5, 7), (7, 9)]:
        here = slice(start, stop)
        parts.append(model(tokens_BT[:, here], positions_BT[:, here], documents_BT[:, here], cache=cache))
    found = torch.cat(parts, 1)
    torch.testing.assert_close(found[0], whole[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[1, 2:], whole[1, 2:], atol=1e-6, rtol=1e-5)


def test_float64_stays_float64(section: ModelSection):
    wide, narrow = ready(section, torch.float64), ready(section)
    tokens_BT = tokens(2, 7)
    out = wide(tokens_BT)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), narrow(tokens_BT), atol=1e-4, rtol=1e-4)
    for (name, a), b in zip(wide.named_parameters(), narrow.parameters()):
        assert torch.equal(a, b.double()), name


def test_head_gets_hidden_states_and_weight(section: ModelSection):
    model = ready(section)
    out = model(tokens(2, 7), head=lambda given: given)
    assert isinstance(out, HeadInput)
    assert out.hidden_BTD.shape == (2, 7, 32) and out.weight_VD.shape == (VOCAB, 32)
    assert torch.equal(out.logits(), model(tokens(2, 7)))


def test_roles_and_counts(section: ModelSection):
    model = build_model(section, VOCAB)
    roles = model.roles()
    assert list(roles) == [name for name, _ in model.named_parameters()]
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    counts = section.counts()
    assert sum(sizes.values()) == counts.total
    assert sum(n for name, n in sizes.items() if roles[name] == Role.NORM) == counts.norm
    assert roles["embed.weight"] == Role.EMBEDDING
    assert ("head.weight" in roles) == (not section.tie_embeddings)
    routers = {name for name in roles if "router" in name}
    experts = {name for name in roles if ".experts." in name}
    assert {roles[name] for name in routers} <= {Role.ROUTER} and {roles[name] for name in experts} <= {Role.MATRIX}
    assert sum(sizes[name] for name in routers) == counts.router
    assert sum(sizes[name] for name in experts) == counts.experts
    dense = {name for name in roles if "mlp" in name and "norm" not in name} - routers - experts
    assert {roles[name] for name in dense} <= {Role.MATRIX} and sum(sizes[name] for name in dense) == counts.mlp
    assert (
        sum(n for name, n in sizes.items() if ".attention." in name and roles[name] == Role.MATRIX) == counts.attention
    )


def test_biases_have_their_role():
    roles = build_model(small(attention_out_bias=True, mlp_bias=True), VOCAB).roles()
    assert all((role == Role.BIAS) == name.endswith("bias") for name, role in roles.items())
    assert sum(role == Role.BIAS for role in roles.values()) == 3 * 7


def test_c26_rotary_tables_stay_exact():
    """Positions 257 and 15,962 at frequency 1; frequency 10000^(-1/16); bf16 models and meta builds included."""
    plain, factor = frequencies(32, 10_000.0, None)
    assert factor == 1.0
    torch.testing.assert_close(plain[1].item(), 0.5623413252, atol=1e-9, rtol=0)
    tables = Rope(32, 10_000.0, None).tables(torch.tensor([[256, 257, 15_962]]), torch.bfloat16)
    assert tables.cos.dtype == torch.float32
    torch.testing.assert_close(tables.cos[0, 1:, 0, 0], torch.tensor([0.819306, -0.908016]), atol=1e-6, rtol=0)
    model = ready(small(max_context=16_384)).to(torch.bfloat16)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[1].rope))
    model(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[256, 257, 15_962]]))
    assert torch.equal(seen[0].cos[..., 0], tables.cos[..., 0]) and seen[0].cos.dtype == torch.float32
    assert not torch.equal(seen[0].cos[0, 0], seen[0].cos[0, 1])


def test_rotation_is_the_complex_product():
    rope = Rope(8, 100.0, None)
    positions_BT = torch.tensor([[0, 3, 11]])
    tables = rope.tables(positions_BT, torch.float64)
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    turn = torch.polar(
        torch.ones(1, dtype=torch.float64), positions_BT.double()[..., None, None] * frequencies(8, 100.0, None)[0]
    )
    rotated = torch.complex(x[..., :4], x[..., 4:]) * turn
    torch.testing.assert_close(tables.rotate(x), torch.cat((rotated.real, rotated.imag), -1))
    assert torch.autograd.gradcheck(tables.rotate, (x,))


@pytest.mark.parametrize("offset", [False, True])
def test_c27_rms_norm_squares_in_fp32(offset: bool):
    norm = RMSNorm(4, 1e-6, offset)
    norm.weight.data.fill_(0.0 if offset else 1.0)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((1, 4), 300.0, dtype=dtype)
        for module in (norm, norm.to(dtype)):
            out = module(x)
            assert out.dtype == dtype and out.tolist() == [[1.0] * 4]


def test_bfloat16_runs_and_logits_are_fp32(section: ModelSection):
    out = ready(section, torch.bfloat16)(tokens(2, 7), None, torch.tensor([[0] * 7, [0] * 3 + [1] * 4]))
    assert out.dtype == torch.float32 and torch.isfinite(out).all()
