"""The attention seam against the plain formula; documents, windows, padding, caps; no NaN from empty rows."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from truestep.models import attention
from truestep.models.attention import attend, kv_share, mask, row_mask

DOCUMENTS_BT = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [-1, -1, 5, 5, 5, 5, -1, -1]], dtype=torch.int32)


def qkv(dtype: torch.dtype = torch.float64, heads: int = 4, groups: int = 2, requires_grad: bool = True):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 8, 16), (2, groups, 8, 16), (2, groups, 8, 16)]
    return [torch.randn(s, generator=generator, dtype=dtype, requires_grad=requires_grad) for s in shapes]


def plain(q, k, v, window: int | None, scale: float, softcap: float | None) -> torch.Tensor:
    """Query by query, key by key."""
    out = torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        own = DOCUMENTS_BT[b, i]
        seen = [j for j in range(i + 1) if own >= 0 and DOCUMENTS_BT[b, j] == own and (not window or i - j < window)]
        if seen:
            g = h // (q.shape[1] // k.shape[1])
            scores = k[b, g, seen] @ q[b, h, i] * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out[b, h, i] = scores.softmax(0) @ v[b, g, seen]
    return out


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 2])
def test_attend_is_the_plain_formula(window: int | None, softcap: float | None):
    q, k, v = qkv()
    rule = mask(DOCUMENTS_BT, DOCUMENTS_BT, window, softcap=softcap is not None, head_dim=16, dtype=torch.float64)
    out = attend(q, k, v, rule, 0.3, softcap)
    expected = plain(q, k, v, window, 0.3, softcap)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad((out * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 2])
def test_flex_rule_is_the_dense_rule(window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch):
    """The rule that CUDA runs, in FlexAttention's eager form (which has no backward on CPUs)."""
    monkeypatch.setattr(attention, "_flex", lambda: flex_attention)
    monkeypatch.setattr(attention, "_create_block_mask", lambda: create_block_mask)
    q, k, v = qkv(torch.float32, requires_grad=False)
    blocks = attention._block_mask(DOCUMENTS_BT, DOCUMENTS_BT, window)
    dense = mask(DOCUMENTS_BT, DOCUMENTS_BT, window, softcap=softcap is not None, head_dim=16, dtype=torch.float32)
    torch.testing.assert_close(attend(q, k, v, blocks, 0.3, softcap), attend(q, k, v, dense, 0.3, softcap))


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_causal_path_is_the_masked_path(softcap: float | None):
    q, k, v = qkv(torch.float32)
    whole = torch.zeros(2, 8, dtype=torch.int32)
    rule = mask(whole, whole, None, softcap=softcap is not None, head_dim=16, dtype=torch.float32)
    torch.testing.assert_close(attend(q, k, v, None, 0.3, softcap), attend(q, k, v, rule, 0.3, softcap))


def test_c06_documents_of_a_row_do_not_mix():
    """Uniform causal attention over two documents of two tokens, values [1, 1 | 5, 5]."""
    documents_BT = torch.tensor([[0, 0, 1, 1]])
    values = torch.tensor([1.0, 1.0, 5.0, 5.0]).view(1, 1, 4, 1)
    rule = mask(documents_BT, documents_BT, None, softcap=False, head_dim=16, dtype=torch.float32)
    out = attend(torch.zeros_like(values), torch.zeros_like(values), values, rule, 1.0, None)
    assert out.flatten().tolist() == [1.0, 1.0, 5.0, 5.0]


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_c19_a_row_that_sees_nothing_gives_zero(dtype: torch.dtype, softcap: float | None):
    documents_BT = torch.tensor([[-1, 0]])
    q = torch.ones(1, 1, 2, 8, dtype=dtype, requires_grad=True)
    values = torch.tensor([3.0, 4.0], dtype=dtype).view(1, 1, 2, 1).expand(1, 1, 2, 8).clone().requires_grad_()
    rule = mask(documents_BT, documents_BT, None, softcap=softcap is not None, head_dim=16, dtype=dtype)
    out = attend(q, q, values, rule, 1.0, softcap)
    assert (out[0, 0, 0] == 0).all() and (out[0, 0, 1] == 4).all()
    grads = torch.autograd.grad(out.sum(), (q, values))
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0] == 0).all() and (grads[1][0, 0, 0] == 0).all() and (grads[1][0, 0, 1] == 1).all()


def test_scores_keep_their_range_in_half_precision():
    """The softmax is at least fp32: with a cap, scores 30 apart in bfloat16 still sum to one."""
    q = torch.full((1, 1, 3, 16), 8.0, dtype=torch.bfloat16)
    out = attend(q, q, torch.ones_like(q), None, 1 / math.sqrt(16), 30.0)
    assert (out == 1).all()


@pytest.mark.parametrize("window", [None, 2])
def test_flex_rule_of_a_part_of_the_queries(window: int | None, monkeypatch: pytest.MonkeyPatch):
    """The last five places of the rows, whose keys begin three places before them."""
    monkeypatch.setattr(attention, "_flex", lambda: flex_attention)
    monkeypatch.setattr(attention, "_create_block_mask", lambda: create_block_mask)
    q, k, v = qkv(torch.float32, requires_grad=False)
    queries_BT = DOCUMENTS_BT[:, 3:]
    blocks = attention._block_mask(queries_BT, DOCUMENTS_BT, window)
    dense = mask(queries_BT, DOCUMENTS_BT, window, softcap=False, head_dim=16, dtype=torch.float32)
    found = attend(q[:, :, 3:], k, v, blocks, 0.3, None)
    torch.testing.assert_close(found, attend(q[:, :, 3:], k, v, dense, 0.3, None))


def test_masks_of_parts_of_rows_without_documents():
    """A part that begins the row, or whose window does, is plain causal; later ones leave out keys that none sees."""
    options = {"device": torch.device("cpu"), "softcap": False, "head_dim": 16, "dtype": torch.float32}
    assert row_mask(None, range(0, 4), None, **options) == (range(0, 4), None)
    assert row_mask(None, range(0, 4), 4, **options) == (range(0, 4), None)
    keys, rule = row_mask(None, range(4, 8), 3, **options)
    assert keys == range(2, 8) and isinstance(rule, torch.Tensor)
    assert (rule[0, 0] == 0).int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]


def test_key_heads_of_a_part_of_the_query_heads():
    assert kv_share(range(0, 4), 2) == (range(0, 2), None)
    assert kv_share(range(3, 6), 6) == (range(0, 1), None)
    assert kv_share(range(3, 6), 2) == (range(1, 3), [0, 1, 1])
